// Sources and sinks of reductions (cuda/elements.h defines both). A place is that of a range's
// first element.
#pragma once

#include "cuda/elements.h"

namespace rota::cuda {

// Contributions in the wire format, at place_of(index).
template <typename Codec, typename Block, typename PlaceOf>
class Contributions {
 public:
  HOST_DEVICE Contributions(const Elements<Codec, Block>& elements, int num,
                            const PlaceOf& place_of)
      : elements_(elements), num_(num), place_of_(place_of) {}

  using Loaded = typename Codec::Encoded;
  HOST_DEVICE int num() const { return num_; }
  template <bool kIsWhole, uint32_t kUnits>
  HOST_DEVICE_INLINE void load(int index, const Units<kUnits>& units,
                               Loaded (&loaded)[kUnits]) const {
    elements_.template read<kIsWhole>(place_of_(index), units, loaded);
  }
  HOST_DEVICE_INLINE typename Codec::Values decode(const Loaded& loaded) const {
    return Codec::decode(elements_.block(), loaded);
  }

 private:
  const Elements<Codec, Block>& elements_;
  int num_;
  const PlaceOf& place_of_;
};

// Partial sums in the accumulate dtype, at partial_of(index).
template <typename Codec, typename Block, typename PartialOf>
class Partials {
 public:
  HOST_DEVICE Partials(const Elements<Codec, Block>& elements, int num, const PartialOf& partial_of)
      : elements_(elements), num_(num), partial_of_(partial_of) {}

  using Loaded = typename Codec::Values;
  HOST_DEVICE int num() const { return num_; }
  template <bool kIsWhole, uint32_t kUnits>
  HOST_DEVICE_INLINE void load(int index, const Units<kUnits>& units,
                               Loaded (&loaded)[kUnits]) const {
    elements_.read_partials(partial_of_(index), units, loaded);
  }
  HOST_DEVICE_INLINE static const Loaded& decode(const Loaded& loaded) { return loaded; }

 private:
  const Elements<Codec, Block>& elements_;
  int num_;
  const PartialOf& partial_of_;
};

// A partial sum of other ranks, then this rank's contribution: a step of a ring.
template <typename Codec, typename Block>
class PartialAndOwn {
 public:
  HOST_DEVICE PartialAndOwn(const Elements<Codec, Block>& elements, const std::byte* partial,
                            const WirePlace& own)
      : elements_(elements), partial_(partial), own_(own) {}

  using Loaded = typename Codec::Values;
  HOST_DEVICE int num() const { return 2; }
  template <bool kIsWhole, uint32_t kUnits>
  HOST_DEVICE_INLINE void load(int index, const Units<kUnits>& units,
                               Loaded (&loaded)[kUnits]) const {
    if (index == 0) return elements_.read_partials(partial_, units, loaded);
    typename Codec::Encoded encoded[kUnits];
    elements_.template read<kIsWhole>(own_, units, encoded);
    ROTA_UNROLL
    for (uint32_t u = 0; u < kUnits; ++u) {
      loaded[u] = Codec::decode(elements_.block(), encoded[u]);
    }
  }
  HOST_DEVICE_INLINE static const Loaded& decode(const Loaded& loaded) { return loaded; }

 private:
  const Elements<Codec, Block>& elements_;
  const std::byte* partial_;
  WirePlace own_;
};

// Divides, rounds once, and stores to num_places places: place_of(0), place_of(1), ...
template <typename Codec, typename Block, typename PlaceOf>
class Results {
 public:
  // first_elem: the range's first element, counted from the start of the tensor.
  HOST_DEVICE Results(const Elements<Codec, Block>& elements, uint64_t first_elem, int num_places,
                      const PlaceOf& place_of)
      : elements_(elements),
        first_elem_(first_elem),
        num_places_(num_places),
        place_of_(place_of) {}

  template <bool kIsWhole, uint32_t kUnits>
  HOST_DEVICE_INLINE void put(const Units<kUnits>& units,
                              typename Codec::Values (&values)[kUnits]) const {
    elements_.divide(values);
    typename Codec::Encoded encoded[kUnits];
    ROTA_UNROLL
    for (uint32_t u = 0; u < kUnits; ++u) {
      encoded[u] = Codec::encode(elements_.block(), values[u], elements_.args().rounding,
                                 first_elem_ + units.elem[u]);
    }
    for (int i = 0; i < num_places_; ++i) {
      elements_.template write<kIsWhole>(place_of_(i), units, encoded);
    }
  }

 private:
  const Elements<Codec, Block>& elements_;
  uint64_t first_elem_;
  int num_places_;
  const PlaceOf& place_of_;
};

// Stores an incomplete sum to num_places slots: partial_of(0), partial_of(1), ...
template <typename Codec, typename Block, typename PartialOf>
class PartialResults {
 public:
  HOST_DEVICE PartialResults(const Elements<Codec, Block>& elements, int num_places,
                             const PartialOf& partial_of)
      : elements_(elements), num_places_(num_places), partial_of_(partial_of) {}

  template <bool kIsWhole, uint32_t kUnits>
  HOST_DEVICE_INLINE void put(const Units<kUnits>& units,
                              const typename Codec::Values (&values)[kUnits]) const {
    for (int i = 0; i < num_places_; ++i) {
      std::byte* const partial = partial_of_(i);
      ROTA_UNROLL
      for (uint32_t u = 0; u < kUnits; ++u) {
        Codec::write_partial(elements_.block(), partial, units.elem[u], units.num_elems[u],
                             values[u]);
      }
    }
  }

 private:
  const Elements<Codec, Block>& elements_;
  int num_places_;
  const PartialOf& partial_of_;
};

}  // namespace rota::cuda
