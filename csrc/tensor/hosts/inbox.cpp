#include "tensor/hosts/inbox.h"

#include <algorithm>

#include "core/watch.h"

namespace rota::tensors {

bool Inbox::matches(const Place& place, int source, int64_t tag) {
  return place.tag == tag && (place.source == source || place.source == kAnyRank);
}

void Inbox::deliver(int source, const Envelope& envelope) {
  const std::lock_guard lock(mutex_);
  const auto place = std::ranges::find_if(
      places_, [&](const PlaceRef& one) { return matches(*one, source, envelope.tag); });
  if (place == places_.end()) {
    arrivals_.push_back({source, envelope});
    return;
  }
  (*place)->arrival = {source, envelope};
  places_.erase(place);
  changed_->notify_all();
}

Inbox::PlaceRef Inbox::enter(int source, int64_t tag) {
  auto place = std::make_shared<Place>(Place{source, tag, std::nullopt});
  const std::lock_guard lock(mutex_);
  const auto arrival = std::ranges::find_if(
      arrivals_, [&](const Arrival& one) { return matches(*place, one.source, one.envelope.tag); });
  if (arrival == arrivals_.end()) {
    places_.push_back(place);
  } else {
    place->arrival = *arrival;
    arrivals_.erase(arrival);
  }
  return place;
}

std::optional<Inbox::Arrival> Inbox::wait(Place& place, std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  changed_->wait_for(lock, patience, [&] { return place.arrival || error_; });
  if (!place.arrival && error_) throw *error_;
  return place.arrival;
}

bool Inbox::leave(const PlaceRef& place) {
  const std::lock_guard lock(mutex_);
  if (place->arrival) return false;
  places_.remove(place);
  return true;
}

void Inbox::fail(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = error;
  changed_->notify_all();
}

}  // namespace rota::tensors
