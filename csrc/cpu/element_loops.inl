// The element loops, compiled once per instruction set by the files that include this one.
// ROTA_ISA_NAMESPACE names the table, ROTA_VECTOR_BYTES is the register width: 64 for AVX-512, 32
// for AVX2 with F16C, 16 elsewhere (the target pragma does not define the compiler's own macros in
// C++). Arithmetic uses the compiler's generic vectors; only conversions of float16 and, with
// AVX-512, sums of squares need intrinsics.
//
// Includes only its own parts and headers whose functions are always inlined, and calls no library
// template: see the comment in element_loops_avx2.cpp.

// Each part uses those before it.
// clang-format off
#include "cpu/lanes.inl"
#include "cpu/wire_roundings.inl"
#include "cpu/wire_loops.inl"
#include "cpu/update_loops.inl"
// clang-format on

namespace rota::cpu::ROTA_ISA_NAMESPACE {
namespace {

// ---- reduce

// These turn a sum into a result. Function objects rather than lambdas, because the target pragma
// of the including file does not reach lambdas inside templates.
template <typename Acc>
struct Keep {
  Acc operator()(Acc sum) const { return sum; }
};
template <typename Acc>
struct MultiplyBy {
  Acc factor;
  Acc operator()(Acc sum) const { return sum * factor; }
};
template <typename Acc>
struct DivideBy {
  Acc divisor;
  Acc operator()(Acc sum) const { return sum / divisor; }
};

// Independent accumulators that hide the latency of loads and additions; 4 fill the load ports,
// more gained nothing.
constexpr size_t kUnroll = 4;

// What sum_up() adds: kUnroll vectors from `elem` on, or num_lanes elements.
template <DType dtype, ReduceOp op>
struct ReducedElements {
  using Lanes = LanesOf<dtype>;
  using Acc = typename Lanes::Acc;

  const void* const* srcs;
  size_t elem;

  const char* address(int source) const {
    return static_cast<const char*>(srcs[source]) + elem * Lanes::kElemBytes;
  }
  void load(int source, Acc (&values)[kUnroll]) const {
    const char* src = address(source);
    for (size_t u = 0; u < kUnroll; ++u) {
      values[u] = Lanes::load(src + u * Lanes::kNumLanes * Lanes::kElemBytes);
    }
  }
  static Acc add(Acc a, Acc b) { return combine<dtype, op>(a, b); }
};
template <DType dtype, ReduceOp op>
struct RestOfElements : ReducedElements<dtype, op> {
  using typename ReducedElements<dtype, op>::Lanes, typename ReducedElements<dtype, op>::Acc;

  size_t num_lanes;

  void load(int source, Acc (&values)[1]) const {
    values[0] = load_part<Lanes>(this->address(source), num_lanes);
  }
};

// One vector of the accumulate dtype at a time.
template <DType dtype, ReduceOp op, typename Order, typename Finish>
void reduce_in(const Order& order, const void* const* srcs, void* dst, size_t num_elems,
               const Finish& finish) {
  using Lanes = LanesOf<dtype>;
  using Acc = typename Lanes::Acc;
  constexpr size_t kBlock = kUnroll * Lanes::kNumLanes;
  size_t elem = 0;
  for (; elem + kBlock <= num_elems; elem += kBlock) {
    Acc acc[kUnroll];
    order.sum_up(ReducedElements<dtype, op>{srcs, elem}, acc);
    for (size_t u = 0; u < kUnroll; ++u) {
      Lanes::store(static_cast<char*>(dst) + (elem + u * Lanes::kNumLanes) * Lanes::kElemBytes,
                   finish(acc[u]));
    }
  }
  // The tail goes through a padded vector, so that its arithmetic is that of whole vectors.
  while (elem < num_elems) {
    const size_t rest = num_elems - elem;
    const size_t num_lanes = rest < Lanes::kNumLanes ? rest : Lanes::kNumLanes;
    Acc acc[1];
    order.sum_up(RestOfElements<dtype, op>{{srcs, elem}, num_lanes}, acc);
    alignas(kVectorBytes) char lanes[kVectorBytes];
    Lanes::store(lanes, finish(acc[0]));
    __builtin_memcpy(static_cast<char*>(dst) + elem * Lanes::kElemBytes, lanes,
                     num_lanes * Lanes::kElemBytes);
    elem += num_lanes;
  }
}

template <DType dtype, ReduceOp op, typename Finish>
void reduce_with(const Summands<const void*>& summands, void* dst, size_t num_elems,
                 const Finish& finish) {
  const auto& [srcs, num, num_additions] = summands;
  if (num_additions == nullptr) {
    reduce_in<dtype, op>(InTurn{num}, srcs, dst, num_elems, finish);
  } else {
    reduce_in<dtype, op>(InTree{num, num_additions}, srcs, dst, num_elems, finish);
  }
}

// One at a time, since processors have no vector division of integers.
template <typename Integer>
void truncate_quotients(char* dst, size_t num_elems, int divisor) {
  for (size_t elem = 0; elem < num_elems; ++elem, dst += sizeof(Integer)) {
    store_bytes(dst, static_cast<Integer>(load_bytes<Integer>(dst) / divisor));
  }
}

template <DType dtype, ReduceOp op>
void reduce(const Summands<const void*>& summands, void* dst, size_t num_elems, int divisor) {
  using Acc = typename LanesOf<dtype>::Acc;
  if constexpr (op == ReduceOp::kAvg && !info(dtype).is_floating) {
    reduce<dtype, ReduceOp::kSum>(summands, dst, num_elems, divisor);
    truncate_quotients<__typeof__(Acc{}[0])>(static_cast<char*>(dst), num_elems, divisor);
  } else if constexpr (op != ReduceOp::kAvg) {
    reduce_with<dtype, op>(summands, dst, num_elems, Keep<Acc>{});
  } else if ((divisor & (divisor - 1)) == 0) {
    // The reciprocal of a power of two is exact, so the product rounds as the quotient would; a
    // division takes as long as reading the sources (64 KiB, 2 ranks: 10.2 instead of 6.5 us).
    reduce_with<dtype, op>(summands, dst, num_elems, MultiplyBy<Acc>{1 / broadcast<Acc>(divisor)});
  } else {
    reduce_with<dtype, op>(summands, dst, num_elems, DivideBy<Acc>{broadcast<Acc>(divisor)});
  }
}

// ---- convert

// Between floats of at most 32 bits, through float32: widening is exact, narrowing rounds once.
template <DType from, DType to>
void convert(const void* src, void* dst, size_t num_elems) {
  using From = LanesOf<from>;
  using To = LanesOf<to>;
  const auto* in = static_cast<const char*>(src);
  auto* out = static_cast<char*>(dst);
  size_t elem = 0;
  for (; elem + kFloatLanes <= num_elems; elem += kFloatLanes) {
    To::store(out + elem * To::kElemBytes, From::load(in + elem * From::kElemBytes));
  }
  if (elem < num_elems) {
    alignas(kVectorBytes) char lanes[kVectorBytes] = {};
    __builtin_memcpy(lanes, in + elem * From::kElemBytes, (num_elems - elem) * From::kElemBytes);
    alignas(kVectorBytes) char rounded[kVectorBytes];
    To::store(rounded, From::load(lanes));
    __builtin_memcpy(out + elem * To::kElemBytes, rounded, (num_elems - elem) * To::kElemBytes);
  }
}

template <DType to>
void convert_from_double(const void* src, void* dst, size_t num_elems) {
  const auto* in = static_cast<const char*>(src);
  auto* out = static_cast<char*>(dst);
  for (size_t elem = 0; elem < num_elems; elem += kFloatLanes) {
    const size_t rest = num_elems - elem;
    const size_t num_lanes = rest < kFloatLanes ? rest : kFloatLanes;
    float lanes[kFloatLanes] = {};
    for (size_t i = 0; i < num_lanes; ++i) {
      const auto value = load_bytes<double>(in + (elem + i) * sizeof(double));
      lanes[i] = to == DType::kFloat32 ? static_cast<float>(value) : round_to_odd(value);
    }
    convert<DType::kFloat32, to>(lanes, out + elem * LanesOf<to>::kElemBytes, num_lanes);
  }
}

template <DType from>
void convert_to_double(const void* src, void* dst, size_t num_elems) {
  const auto* in = static_cast<const char*>(src);
  auto* out = static_cast<char*>(dst);
  for (size_t elem = 0; elem < num_elems; elem += kFloatLanes) {
    const size_t rest = num_elems - elem;
    const size_t num_lanes = rest < kFloatLanes ? rest : kFloatLanes;
    float lanes[kFloatLanes];
    convert<from, DType::kFloat32>(in + elem * LanesOf<from>::kElemBytes, lanes, num_lanes);
    for (size_t i = 0; i < num_lanes; ++i) {
      store_bytes(out + (elem + i) * sizeof(double), static_cast<double>(lanes[i]));
    }
  }
}

// ---- the table

template <DType dtype, ReduceOp op>
constexpr ReduceFn reduce_entry() {
  if constexpr (is_defined(op, dtype)) {
    return reduce<dtype, op>;
  } else {
    return nullptr;
  }
}

template <DType from, DType to>
constexpr ConvertFn convert_entry() {
  if constexpr (!info(from).is_floating || !info(to).is_floating || from == to) {
    return nullptr;
  } else if constexpr (from == DType::kFloat64) {
    return convert_from_double<to>;
  } else if constexpr (to == DType::kFloat64) {
    return convert_to_double<from>;
  } else {
    return convert<from, to>;
  }
}

template <size_t dtype, size_t... ops>
constexpr void fill_reduce(ElementLoops& table, std::index_sequence<ops...>) {
  ((table.reduce_fns[dtype][ops] =
        reduce_entry<static_cast<DType>(dtype), static_cast<ReduceOp>(ops)>()),
   ...);
}
template <size_t from, size_t... tos>
constexpr void fill_convert(ElementLoops& table, std::index_sequence<tos...>) {
  ((table.convert_fns[from][tos] =
        convert_entry<static_cast<DType>(from), static_cast<DType>(tos)>()),
   ...);
}
template <size_t dtype>
constexpr void fill_wire(ElementLoops& table) {
  table.wire_loops[dtype][false] = wire_entry<static_cast<DType>(dtype), false>();
  table.wire_loops[dtype][true] = wire_entry<static_cast<DType>(dtype), true>();
}
template <size_t... dtypes>
constexpr ElementLoops make_table(std::string_view isa, std::index_sequence<dtypes...>) {
  ElementLoops table{isa, {}, {}, {}, sum_of_squares, update};
  (fill_wire<dtypes>(table), ...);
  (fill_reduce<dtypes>(table, std::make_index_sequence<kNumReduceOps>{}), ...);
  (fill_convert<dtypes>(table, std::make_index_sequence<kNumDTypes>{}), ...);
  return table;
}

}  // namespace

#define ROTA_STRING_OF(name) #name
#define ROTA_STRING(name) ROTA_STRING_OF(name)
extern constexpr ElementLoops kTable =
    make_table(ROTA_STRING(ROTA_ISA_NAMESPACE), std::make_index_sequence<kNumDTypes>{});

}  // namespace rota::cpu::ROTA_ISA_NAMESPACE
