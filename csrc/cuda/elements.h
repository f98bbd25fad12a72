// What a block does with a range of elements: copies them, or sums them from several sources. Knows
// neither ranks nor flags: sources and sinks define where elements come from and go.
//
// A source has num(), load<kIsWhole>(index, units, loaded), which fills one Loaded for each unit,
// and decode(loaded), which returns Codec::Values; a sink has put<kIsWhole>(units, values).
// Elements count from the start of the range.
#pragma once

#include <utility>

#include "base/combine.h"
#include "cuda/codec.h"
#include "cuda/collective_args.h"
#include "schedule/chunk.h"

namespace rota::cuda {

using schedule::Range;

// The units that one thread works on at a time, so that several loads are in flight.
template <uint32_t kUnits>
struct Units {
  uint32_t elem[kUnits];       // this thread's first element of each unit
  uint32_t num_elems[kUnits];  // this thread's elements of it; 0: there is no such unit
};

template <typename Codec, typename Block>
class Elements {
 public:
  using Values = typename Codec::Values;

  HOST_DEVICE Elements(const Block& block, const CollectiveArgs& args)
      : block_(block), args_(args) {}

  HOST_DEVICE const Block& block() const { return block_; }
  HOST_DEVICE const CollectiveArgs& args() const { return args_; }

  // Chunks have at most 2^31 elements: launch_plan.cpp ensures that.
  HOST_DEVICE static uint32_t length_of(const Range& chunk) {
    return static_cast<uint32_t>(chunk.num_elems);
  }
  // The tensors of the rank that the block works for.
  HOST_DEVICE std::byte* own_input() const { return args_.input[block_.local_rank()]; }
  HOST_DEVICE std::byte* own_output() const { return args_.output[block_.local_rank()]; }
  // The place of the elements from first_elem on, in a tensor of num_elems.
  HOST_DEVICE static WirePlace at(std::byte* base, uint64_t num_elems, uint64_t first_elem) {
    return Codec::format().from(Codec::format().place(base, num_elems), first_elem);
  }
  HOST_DEVICE WirePlace input(const Range& range) const {
    return at(own_input(), args_.num_elems, range.begin);
  }
  HOST_DEVICE WirePlace output(const Range& range) const {
    return at(own_output(), args_.num_elems, range.begin);
  }
  // A chunk in a slot.
  HOST_DEVICE static WirePlace in_slot(std::byte* slot, const Range& range) {
    return Codec::format().place(slot, range.num_elems);
  }

  // Threads that work on one range together; this one is number `thread`.
  struct Team {
    uint32_t thread;
    uint32_t num_threads;
  };
  HOST_DEVICE Team whole_block() const {
    return {static_cast<uint32_t>(block_.thread()), static_cast<uint32_t>(block_.num_threads())};
  }

  // Calls body<kIsWhole>(units) for all units of a range. Each unit is handled by one thread of the
  // team or, in scaled blocks, by the neighbouring threads that share the block.
  template <uint32_t kUnits, typename Body>
  HOST_DEVICE_INLINE void for_each_unit(const Team& team, uint32_t num_elems,
                                        const Body& body) const {
    const uint32_t first = team.thread / Codec::kLanes;
    const uint32_t stride = team.num_threads / Codec::kLanes;
    const uint32_t offset = team.thread % Codec::kLanes * Codec::kElems;
    const uint32_t num_whole = args_.is_aligned ? num_elems / Codec::kUnitElems : 0;
    const uint32_t num_units = (num_elems + Codec::kUnitElems - 1) / Codec::kUnitElems;

    for (uint32_t unit = first; unit < num_whole; unit += kUnits * stride) {
      Units<kUnits> units;
      ROTA_UNROLL
      for (uint32_t u = 0; u < kUnits; ++u) {
        units.elem[u] = (unit + u * stride) * Codec::kUnitElems + offset;
        units.num_elems[u] = unit + u * stride < num_whole ? Codec::kElems : 0;
      }
      body.template operator()<true>(units);
    }
    for (uint32_t unit = num_whole + first; unit < num_units; unit += stride) {
      const uint32_t elem = unit * Codec::kUnitElems + offset;
      const uint32_t rest = elem < num_elems ? num_elems - elem : 0;
      const uint32_t num_left = rest < Codec::kElems ? rest : Codec::kElems;
      body.template operator()<false>(Units<1>{{elem}, {num_left}});
    }
  }

  template <bool kIsWhole, uint32_t kUnits>
  HOST_DEVICE_INLINE void read(const WirePlace& from, const Units<kUnits>& units,
                               typename Codec::Encoded (&encoded)[kUnits]) const {
    ROTA_UNROLL
    for (uint32_t u = 0; u < kUnits; ++u) {
      encoded[u] = Codec::template read<kIsWhole>(block_, from, units.elem[u], units.num_elems[u]);
    }
  }
  template <bool kIsWhole, uint32_t kUnits>
  HOST_DEVICE_INLINE void write(const WirePlace& to, const Units<kUnits>& units,
                                const typename Codec::Encoded (&encoded)[kUnits]) const {
    ROTA_UNROLL
    for (uint32_t u = 0; u < kUnits; ++u) {
      Codec::template write<kIsWhole>(block_, to, units.elem[u], units.num_elems[u], encoded[u]);
    }
  }

  template <uint32_t kUnits>
  HOST_DEVICE_INLINE void read_partials(const std::byte* from, const Units<kUnits>& units,
                                        Values (&partials)[kUnits]) const {
    ROTA_UNROLL
    for (uint32_t u = 0; u < kUnits; ++u) {
      partials[u] = Codec::read_partial(block_, from, units.elem[u], units.num_elems[u]);
    }
  }

  // Copies a range to num_places places: place_of(0), place_of(1), ...
  template <typename PlaceOf>
  HOST_DEVICE void copy(const Range& range, const WirePlace& from, int num_places,
                        const PlaceOf& place_of) const {
    if (num_places == 0) return;  // the compiler would keep the unused loads
    copy_by(whole_block(), length_of(range), from, num_places, place_of);
  }

  // Makes num_copies copies: copy_of(0), copy_of(1), ... Each has its own team of neighbouring
  // threads, because short copies made one after another would each wait for the full memory
  // latency.
  struct Copy {
    WirePlace from;
    WirePlace to;
    uint32_t num_elems;
  };
  template <typename CopyOf>
  HOST_DEVICE void copy_each(int num_copies, const CopyOf& copy_of) const {
    if (num_copies == 0) return;
    const auto [thread, num_threads] = whole_block();
    const auto num_teams = static_cast<uint32_t>(
        schedule::min_of(static_cast<uint64_t>(num_copies), num_threads / kTeamThreads));
    const uint32_t team_threads = num_threads / num_teams / kTeamThreads * kTeamThreads;
    const uint32_t own_team = thread / team_threads;
    if (own_team >= num_teams) return;  // leftover threads, too few for a team
    for (uint32_t i = own_team; i < static_cast<uint32_t>(num_copies); i += num_teams) {
      const Copy copy = copy_of(static_cast<int>(i));
      const auto place_of = [&](int) { return copy.to; };
      copy_by({thread % team_threads, team_threads}, copy.num_elems, copy.from, 1, place_of);
    }
  }

  // Puts (source 0 + source 1) + source 2 ... into the sink.
  template <typename Sources, typename Sink>
  HOST_DEVICE void reduce(const Range& range, const Sources& sources, const Sink& sink) const {
    const auto reduce_units = [&]<bool kIsWhole, uint32_t kUnits>(const Units<kUnits>& units) {
      Values sums[kUnits];
      sum_group<kIsWhole>(sources, 0, sources.num(), units, sums);
      sink.template put<kIsWhole>(units, sums);
    };
    for_each_unit<kReducedUnits>(whole_block(), length_of(range), reduce_units);
  }

  // Puts the sum of every rank's contribution, in the order of the args, into the sink.
  template <Sums kSums, typename Sources, typename Sink>
  HOST_DEVICE void reduce_all(const Range& range, const Sources& sources, const Sink& sink) const {
    if constexpr (kSums == Sums::kInGroups) {
      reduce_in_groups(range, sources, sink);
    } else {
      reduce_in_tree(range, sources, sink);
    }
  }

  // Turns complete sums into results, still in the accumulate dtype.
  template <uint32_t kUnits>
  HOST_DEVICE_INLINE void divide(Values (&values)[kUnits]) const {
    constexpr DType kDType = Codec::format().dtype;
    if constexpr (is_defined(ReduceOp::kAvg, kDType)) {
      if (args_.op != ReduceOp::kAvg) return;
      using Acc = typename Codec::Acc;
      if constexpr (!info(kDType).is_floating) {
        const auto divisor = static_cast<int32_t>(args_.divisor);
        for_each_elem(values, [&](Acc& value, uint32_t, uint32_t) {
          value = static_cast<Acc>(value / divisor);  // truncates
        });
      } else if (const auto reciprocal = static_cast<Acc>(args_.reciprocal); reciprocal != 0) {
        for_each_elem(values, [&](Acc& value, uint32_t, uint32_t) { value *= reciprocal; });
      } else {
        const auto divisor = static_cast<Acc>(args_.divisor);
        for_each_elem(values, [&](Acc& value, uint32_t, uint32_t) { value /= divisor; });
      }
    }
  }

 private:
  // Team sizes are multiples of this, so that threads that share a unit are in one team.
  static constexpr uint32_t kTeamThreads = 8;

  template <typename Sources, typename Sink>
  HOST_DEVICE void reduce_in_groups(const Range& range, const Sources& sources,
                                    const Sink& sink) const {
    const int group_size = args_.group_size;
    const auto reduce_units = [&]<bool kIsWhole, uint32_t kUnits>(const Units<kUnits>& units) {
      Values totals[kUnits];
      for (int first = 0; first < sources.num(); first += group_size) {
        Values sums[kUnits];
        sum_group<kIsWhole>(sources, first, group_size, units, sums);
        if (first == 0) {
          ROTA_UNROLL
          for (uint32_t u = 0; u < kUnits; ++u) totals[u] = sums[u];
        } else {
          combine_with(totals, sums);
        }
      }
      sink.template put<kIsWhole>(units, totals);
    };
    for_each_unit<kReducedUnits>(whole_block(), length_of(range), reduce_units);
  }

  // Sources are loaded in pairs, as in sum_group().
  template <typename Sources, typename Sink>
  HOST_DEVICE void reduce_in_tree(const Range& range, const Sources& sources,
                                  const Sink& sink) const {
    const auto reduce_units = [&]<bool kIsWhole, uint32_t kUnits>(const Units<kUnits>& units) {
      PendingSums<kUnits> pending{};
      typename Sources::Loaded one[kUnits], other[kUnits];
      int source = sources.num() % 2;
      if (source != 0) {
        sources.template load<kIsWhole>(0, units, one);
        push(sources, one, 0, pending);
      }
      for (; source < sources.num(); source += 2) {
        sources.template load<kIsWhole>(source, units, one);
        sources.template load<kIsWhole>(source + 1, units, other);
        push(sources, one, source, pending);
        push(sources, other, source + 1, pending);
      }
      sink.template put<kIsWhole>(units, pending.of[0]);
    };
    for_each_unit<kReducedUnits>(whole_block(), length_of(range), reduce_units);
  }

  // Sums of a tree that wait for others, the newest first. There is one for each level at most,
  // since a contribution that completes a sum is added to it at once. The stack is moved instead of
  // indexed, because registers have no index.
  template <uint32_t kUnits>
  struct PendingSums {
    Values of[kMostTreeLevels][kUnits];
  };
  template <typename Sources, uint32_t kUnits>
  HOST_DEVICE_INLINE void push(const Sources& sources,
                               const typename Sources::Loaded (&loaded)[kUnits], int source,
                               PendingSums<kUnits>& pending) const {
    uint32_t num_additions = args_.tree.after(source);
    if (num_additions == 0) {
      ROTA_UNROLL
      for (int i = kMostTreeLevels - 1; i > 0; --i) assign(pending.of[i], pending.of[i - 1]);
      decode(sources, loaded, pending.of[0]);
      return;
    }
    add(sources, loaded, pending.of[0]);
    for (; num_additions > 1; --num_additions) {
      combine_with(pending.of[1], pending.of[0]);
      ROTA_UNROLL
      for (int i = 1; i < kMostTreeLevels; ++i) assign(pending.of[i - 1], pending.of[i]);
    }
  }
  template <uint32_t kUnits>
  HOST_DEVICE_INLINE static void assign(Values (&to)[kUnits], const Values (&from)[kUnits]) {
    ROTA_UNROLL
    for (uint32_t u = 0; u < kUnits; ++u) to[u] = from[u];
  }

  template <typename PlaceOf>
  HOST_DEVICE void copy_by(const Team& team, uint32_t num_elems, const WirePlace& from,
                           int num_places, const PlaceOf& place_of) const {
    const auto copy_units = [&]<bool kIsWhole, uint32_t kUnits>(const Units<kUnits>& units) {
      typename Codec::Encoded encoded[kUnits];
      read<kIsWhole>(from, units, encoded);
      for (int i = 0; i < num_places; ++i) write<kIsWhole>(place_of(i), units, encoded);
    };
    for_each_unit<kCopiedUnits>(team, num_elems, copy_units);
  }

  // Fewer units in flight would expose memory latency; more would run out of registers. Per unit,
  // each of two sources takes four 32-bit registers or more, a sum and a total one or two for each
  // element, and sign-extending a narrow integer takes others.
  static constexpr uint32_t kCopiedUnits = 4;
  static constexpr uint32_t kReducedUnits = sizeof(typename Codec::Acc) < 4 ? 1
                                            : Codec::kElems < 4             ? 3
                                                                            : 16 / Codec::kElems;

  // Calls body(value, unit, index) for each element.
  template <uint32_t kUnits, typename Body>
  HOST_DEVICE_INLINE static void for_each_elem(Values (&values)[kUnits], const Body& body) {
    ROTA_UNROLL
    for (uint32_t u = 0; u < kUnits; ++u) {
      ROTA_UNROLL
      for (uint32_t i = 0; i < Codec::kElems; ++i) body(values[u].of[i], u, i);
    }
  }

  // Sums group_size sources from `first` on. They are added one after another but loaded in pairs,
  // so that each pair costs one memory latency. Nothing between the two loads may wait for the
  // first, not even a branch, because the compiler moves registers in front of it. So if the number
  // of sources is odd, the first is loaded alone.
  template <bool kIsWhole, typename Sources, uint32_t kUnits>
  HOST_DEVICE_INLINE void sum_group(const Sources& sources, int first, int group_size,
                                    const Units<kUnits>& units, Values (&sums)[kUnits]) const {
    typename Sources::Loaded one[kUnits], other[kUnits];
    const auto load_pair = [&](int source) {
      sources.template load<kIsWhole>(source, units, one);
      sources.template load<kIsWhole>(source + 1, units, other);
    };
    const bool is_odd = group_size % 2 != 0;
    if (is_odd) {
      sources.template load<kIsWhole>(first, units, one);
      decode(sources, one, sums);
    } else {
      load_pair(first);
      decode(sources, one, sums);
      add(sources, other, sums);
    }
    for (int i = is_odd ? 1 : 2; i < group_size; i += 2) {
      load_pair(first + i);
      add(sources, one, sums);
      add(sources, other, sums);
    }
  }
  template <typename Sources, uint32_t kUnits>
  HOST_DEVICE_INLINE static void decode(const Sources& sources,
                                        const typename Sources::Loaded (&loaded)[kUnits],
                                        Values (&values)[kUnits]) {
    ROTA_UNROLL
    for (uint32_t u = 0; u < kUnits; ++u) values[u] = sources.decode(loaded[u]);
  }
  template <typename Sources, uint32_t kUnits>
  HOST_DEVICE_INLINE void add(const Sources& sources,
                              const typename Sources::Loaded (&loaded)[kUnits],
                              Values (&sums)[kUnits]) const {
    Values next[kUnits];
    decode(sources, loaded, next);
    combine_with(sums, next);
  }
  template <uint32_t kUnits>
  HOST_DEVICE_INLINE void combine_with(Values (&sums)[kUnits], const Values (&next)[kUnits]) const {
    with_op([&]<ReduceOp op>() {
      for_each_elem(sums, [&](typename Codec::Acc& sum, uint32_t u, uint32_t i) {
        sum = combine<Codec::format().dtype, op>(sum, next[u].of[i]);
      });
    });
  }
  // Selects the operation outside the loop over elements; inside it, the selection would be most of
  // the instructions. Undefined operations do not get here: launch_plan.cpp refuses them.
  template <typename Body>
  HOST_DEVICE_INLINE void with_op(const Body& body) const {
    if constexpr (Codec::format().is_block_scaled) {
      body.template operator()<ReduceOp::kSum>();  // or kAvg: no other is defined
    } else {
      with_any_op(body, std::make_index_sequence<kNumReduceOps>{});
    }
  }
  // An average is a sum until it is divided.
  template <typename Body, size_t... numbers>
  HOST_DEVICE_INLINE void with_any_op(const Body& body, std::index_sequence<numbers...>) const {
    const ReduceOp op = args_.op == ReduceOp::kAvg ? ReduceOp::kSum : args_.op;
    const auto is_done_by = [&]<ReduceOp candidate>() {
      if constexpr (candidate != ReduceOp::kAvg && is_defined(candidate, Codec::format().dtype)) {
        if (op != candidate) return false;
        body.template operator()<candidate>();
        return true;
      }
      return false;
    };
    const bool is_done = (is_done_by.template operator()<static_cast<ReduceOp>(numbers)>() || ...);
    if (!is_done) __builtin_unreachable();
  }

  const Block& block_;
  const CollectiveArgs& args_;
};

}  // namespace rota::cuda
