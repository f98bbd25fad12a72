#include "hosts/inbox.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

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
  remove (*place)();
}

void Inbox::enter(const PlaceRef& place) {
  const std::lock_guard lock(mutex_);
  const auto arrival = std::ranges::find_if(
      arrivals_, [&](const Arrival& one) { return matches(*place, one.source, one.envelope.tag); });
  places_.push_back(place);
  if (arrival != arrivals_.end()) {
    place->arrival = *arrival;
    arrivals_.erase(arrival);
  } else if (error_) {
    place->error = error_;
  } else {
    return;
  }
  remove(place)();
}

std::function<void()> Inbox::remove(const PlaceRef& place) {
  std::function<void()> on_end = std::move(place->on_end);
  places_.remove(place);
  return on_end;
}

bool Inbox::is_awaited() const {
  const std::lock_guard lock(mutex_);
  return !places_.empty();
}

Inbox::PlaceRef Inbox::overdue() const {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  const auto late =
      std::ranges::find_if(places_, [&](const PlaceRef& one) { return one->deadline <= now; });
  return late == places_.end() ? nullptr : *late;
}

std::vector<Inbox::PlaceRef> Inbox::from_any() const {
  std::vector<PlaceRef> places;
  const std::lock_guard lock(mutex_);
  std::ranges::copy_if(places_, std::back_inserter(places),
                       [](const PlaceRef& one) { return one->source == kAnyRank; });
  return places;
}

std::function<void()> Inbox::leave(const PlaceRef& place) {
  const std::lock_guard lock(mutex_);
  const auto first = std::ranges::find_if(places_, [&](const PlaceRef& one) {
    return one->source == kAnyRank && one->tag == place->tag;
  });
  return first == places_.end() || *first != place ? nullptr : remove(place);
}

void Inbox::fail(const Error& error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = error;
  while (!places_.empty()) {
    const PlaceRef place = places_.front();
    place->error = error_;
    remove(place)();
  }
}

}  // namespace rota::hosts
