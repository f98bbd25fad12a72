#include "hosts/inbox.h"

#include <algorithm>
#include <new>

#include "core/watch.h"

namespace rota::hosts {

bool Inbox::matches(const Place& place, int source, int64_t tag) {
  return place.tag == tag && (place.source == source || place.source == kAnyRank);
}

std::shared_ptr<Inbox::EarlyData> Inbox::take_in(int source, const Envelope& envelope,
                                                 Engine& engine) {
  auto early = std::make_shared<EarlyData>();
  try {
    early->bytes.resize(envelope.num_bytes());
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::kTransport,
                join("rota.recv: no memory for ", envelope.to_string(), " of rank ", source,
                     " that came before its recv; call recv before the sender sends"));
  }
  early->transfer = engine.recv(early->bytes.data(), early->bytes.size(), source,
                                static_cast<int>(envelope.data_tag));
  return early;
}

void Inbox::deliver(int source, const Envelope& envelope, Engine& engine) {
  const std::lock_guard lock(mutex_);
  const auto place = std::ranges::find_if(
      places_, [&](const PlaceRef& one) { return matches(*one, source, envelope.tag); });
  if (place == places_.end()) {
    arrivals_.push_back({source, envelope, take_in(source, envelope, engine)});
    return;
  }
  (*place)->arrival = {source, envelope, nullptr};
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

bool Inbox::is_awaited() const {
  const std::lock_guard lock(mutex_);
  return !places_.empty();
}

bool Inbox::leave(const PlaceRef& place) {
  const std::lock_guard lock(mutex_);
  if (place->arrival) return false;
  const auto first = std::ranges::find_if(places_, [&](const PlaceRef& one) {
    return one->source == kAnyRank && one->tag == place->tag;
  });
  if (*first != place) return false;
  places_.erase(first);
  return true;
}

void Inbox::fail(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = error;
  changed_->notify_all();
}

}  // namespace rota::hosts
