// The sum of many float64 numbers in an order that depends on nothing but how many there are: the
// CPU forms it with one thread, a GPU with a block of them, and both get the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace rota {

// Number i is added to bin i % kTreeBins, in ascending order; then the upper half of the bins to
// the lower half, until one is left.
inline constexpr uint64_t kTreeBins = 512;

// All threads of the block call this; the first gets the sum, the others 0. bins: shared by them.
template <typename Block>
HOST_DEVICE double sum_in_fixed_tree(const Block& block, const double* values, uint64_t num_values,
                                     double* bins) {
  const auto thread = static_cast<uint64_t>(block.thread());
  const auto num_threads = static_cast<uint64_t>(block.num_threads());
  for (uint64_t bin = thread; bin < kTreeBins; bin += num_threads) {
    double sum = 0;
    for (uint64_t i = bin; i < num_values; i += kTreeBins) sum += values[i];
    bins[bin] = sum;
  }
  for (uint64_t half = kTreeBins / 2; half > 0; half /= 2) {
    block.sync();
    for (uint64_t bin = thread; bin < half; bin += num_threads) bins[bin] += bins[bin + half];
  }
  return thread == 0 ? bins[0] : 0;  // the others would read it while it is written
}

// One thread is a block, too.
struct LoneThread {
  int thread() const { return 0; }
  int num_threads() const { return 1; }
  void sync() const {}
};

}  // namespace rota
