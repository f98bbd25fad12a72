// The steps of optimizers. Included after lanes.inl by element_loops.inl, whose opening comment
// applies here too.

namespace rota::cpu::ROTA_ISA_NAMESPACE {
namespace {

// The operators of vectors have no square root.
Vec<float> square_root(Vec<float> value) {
#if ROTA_VECTOR_BYTES == 64
  return (Vec<float>)_mm512_maskz_sqrt_ps(0xffff, (__m512)value);
#elif ROTA_VECTOR_BYTES == 32
  return (Vec<float>)_mm256_sqrt_ps((__m256)value);
#else
  for (size_t i = 0; i < kFloatLanes; ++i) value[i] = __builtin_sqrtf(value[i]);
  return value;
#endif
}

// Vectors of each array of an UpdateState.
struct UpdatedLanes {
  Vec<float> gradients, parameters, momentum, squares, largest;
};

template <bool has_largest>
void update_by_adam(const UpdateStep& step, UpdatedLanes& lanes) {
  auto gradient = lanes.gradients * step.gradient_factor;
  gradient += lanes.parameters * step.l2;
  lanes.momentum += (gradient - lanes.momentum) * step.fresh;
  lanes.squares = lanes.squares * step.beta2 + gradient * gradient * step.fresh_square;
  auto squares = lanes.squares;
  if constexpr (has_largest) {
    lanes.largest = lanes.largest < squares ? squares : lanes.largest;
    squares = lanes.largest;
  }
  const auto scale = square_root(squares) / step.correction + step.eps;
  lanes.parameters = lanes.parameters * step.kept - lanes.momentum / scale * step.size;
}

template <bool has_momentum>
void update_by_sgd(const UpdateStep& step, UpdatedLanes& lanes) {
  auto gradient = lanes.gradients * step.gradient_factor;
  gradient += lanes.parameters * step.l2;
  if constexpr (has_momentum) {
    lanes.momentum =
        step.is_first ? gradient : lanes.momentum * step.momentum + gradient * step.fresh;
    gradient = step.is_nesterov ? gradient + lanes.momentum * step.momentum : lanes.momentum;
  }
  lanes.parameters -= gradient * step.size;
}

template <void (*kUpdate)(const UpdateStep&, UpdatedLanes&), bool kHasMomentum, bool kHasSquares,
          bool kHasLargest>
void update_all(const UpdateStep& step, const UpdateState& state, size_t num_elems) {
  for (size_t elem = 0; elem < num_elems; elem += kFloatLanes) {
    const size_t rest = num_elems - elem;
    const size_t num_bytes = (rest < kFloatLanes ? rest : kFloatLanes) * sizeof(float);
    UpdatedLanes lanes{};
    const auto load = [&](Vec<float>& to, const float* from) __attribute__((always_inline)) {
      if (num_bytes == kVectorBytes) {
        to = load_bytes<Vec<float>>(from + elem);
      } else {
        __builtin_memcpy(&to, from + elem, num_bytes);
      }
    };
    const auto store = [&](float* to, const Vec<float>& from) __attribute__((always_inline)) {
      if (num_bytes == kVectorBytes) {
        store_bytes(to + elem, from);
      } else {
        __builtin_memcpy(to + elem, &from, num_bytes);
      }
    };
    load(lanes.gradients, state.gradients);
    load(lanes.parameters, state.parameters);
    if constexpr (kHasMomentum) load(lanes.momentum, state.momentum);
    if constexpr (kHasSquares) load(lanes.squares, state.squares);
    if constexpr (kHasLargest) load(lanes.largest, state.largest);
    kUpdate(step, lanes);
    store(state.parameters, lanes.parameters);
    if constexpr (kHasMomentum) store(state.momentum, lanes.momentum);
    if constexpr (kHasSquares) store(state.squares, lanes.squares);
    if constexpr (kHasLargest) store(state.largest, lanes.largest);
  }
}

void update(const UpdateStep& step, const UpdateState& state, size_t num_elems) {
  if (step.kind == UpdateStep::Kind::kSgd) {
    if (state.momentum == nullptr) {
      return update_all<update_by_sgd<false>, false, false, false>(step, state, num_elems);
    }
    return update_all<update_by_sgd<true>, true, false, false>(step, state, num_elems);
  }
  if (state.largest == nullptr) {
    return update_all<update_by_adam<false>, true, true, false>(step, state, num_elems);
  }
  update_all<update_by_adam<true>, true, true, true>(step, state, num_elems);
}

}  // namespace
}  // namespace rota::cpu::ROTA_ISA_NAMESPACE
