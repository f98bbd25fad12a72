// Where the elements of a reduction come from and go to (cuda/elements.h says what a source and a
// sink are). Places are those of a range's first element.
#pragma once

#include "cuda/elements.h"

namespace rota::cuda {

// Contributions in the wire format: place_of(index) says where.
template <typename Codec, typename Block, typename PlaceOf>
class Contributions {
 public:
  HOST_DEVICE Contributions(const Elements<Codec, Block>& elements, int num,
                            const PlaceOf& place_of)
      : elements_(elements), num_(num), place_of_(place_of) {}

  HOST_DEVICE int num() const { return num_; }
  template <bool kIsWhole>
  HOST_DEVICE_INLINE typename Codec::Values load(int index, uint32_t elem,
                                                 uint32_t num_elems) const {
    const Block& block = elements_.block();
    return Codec::decode(block,
                         Codec::template read<kIsWhole>(block, place_of_(index), elem, num_elems));
  }

 private:
  const Elements<Codec, Block>& elements_;
  int num_;
  const PlaceOf& place_of_;
};

// Partial sums in the accumulate dtype: partial_of(index) says where.
template <typename Codec, typename Block, typename PartialOf>
class Partials {
 public:
  HOST_DEVICE Partials(const Elements<Codec, Block>& elements, int num, const PartialOf& partial_of)
      : elements_(elements), num_(num), partial_of_(partial_of) {}

  HOST_DEVICE int num() const { return num_; }
  template <bool kIsWhole>
  HOST_DEVICE_INLINE typename Codec::Values load(int index, uint32_t elem,
                                                 uint32_t num_elems) const {
    return Codec::read_partial(elements_.block(), partial_of_(index), elem, num_elems);
  }

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

  HOST_DEVICE int num() const { return 2; }
  template <bool kIsWhole>
  HOST_DEVICE_INLINE typename Codec::Values load(int index, uint32_t elem,
                                                 uint32_t num_elems) const {
    const Block& block = elements_.block();
    if (index == 0) return Codec::read_partial(block, partial_, elem, num_elems);
    return Codec::decode(block, Codec::template read<kIsWhole>(block, own_, elem, num_elems));
  }

 private:
  const Elements<Codec, Block>& elements_;
  const std::byte* partial_;
  WirePlace own_;
};

// Divides, rounds once, and stores to num_places places, each of which place_of(index) gives.
template <typename Codec, typename Block, typename PlaceOf>
class Results {
 public:
  // first_elem: of the range, in the tensor.
  HOST_DEVICE Results(const Elements<Codec, Block>& elements, uint64_t first_elem, int num_places,
                      const PlaceOf& place_of)
      : elements_(elements),
        first_elem_(first_elem),
        num_places_(num_places),
        place_of_(place_of) {}

  template <bool kIsWhole>
  HOST_DEVICE_INLINE void put(uint32_t elem, uint32_t num_elems,
                              typename Codec::Values values) const {
    const Block& block = elements_.block();
    elements_.divide(values);
    const auto encoded =
        Codec::encode(block, values, elements_.args().rounding, first_elem_ + elem);
    for (int i = 0; i < num_places_; ++i) {
      Codec::template write<kIsWhole>(block, place_of_(i), elem, num_elems, encoded);
    }
  }

 private:
  const Elements<Codec, Block>& elements_;
  uint64_t first_elem_;
  int num_places_;
  const PlaceOf& place_of_;
};

// Stores a sum that is not complete, to num_places slots, each of which partial_of(index) gives.
template <typename Codec, typename Block, typename PartialOf>
class PartialResults {
 public:
  HOST_DEVICE PartialResults(const Elements<Codec, Block>& elements, int num_places,
                             const PartialOf& partial_of)
      : elements_(elements), num_places_(num_places), partial_of_(partial_of) {}

  template <bool kIsWhole>
  HOST_DEVICE_INLINE void put(uint32_t elem, uint32_t num_elems,
                              const typename Codec::Values& values) const {
    for (int i = 0; i < num_places_; ++i) {
      Codec::write_partial(elements_.block(), partial_of_(i), elem, num_elems, values);
    }
  }

 private:
  const Elements<Codec, Block>& elements_;
  int num_places_;
  const PartialOf& partial_of_;
};

}  // namespace rota::cuda
