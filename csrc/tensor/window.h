// Windows on tensors, for Python: this process's, those of others, and those of a group's ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/fork_generation.h"
#include "base/wire_format.h"
#include "core/window.h"
#include "hosts/remote_window.h"
#include "hosts/window_service.h"
#include "tensor/tensor_checks.h"
#include "transport/window_memory.h"

namespace rota::tensors {

using Milliseconds = std::chrono::milliseconds;

// A CPU tensor that other processes of the host can open, with words for whoever uses it.
class ExposedTensor {
 public:
  // Moves the tensor's storage to the heap (move_to_heap()). others_may_write: to all of it.
  // torch_holds_it: a call of torch's, whose references are not counted.
  static std::shared_ptr<ExposedTensor> make(const at::Tensor& tensor, uint64_t num_words,
                                             bool others_may_write, bool torch_holds_it);
  // The tensor must lie in the heap.
  ExposedTensor(at::Tensor tensor, uint64_t num_words, bool others_may_write);

  const at::Tensor& tensor() const { return tensor_; }
  transport::WindowView view() const { return memory_.view(); }
  std::string address() const { return memory_.address(); }
  uint64_t load(uint64_t word) const;
  // Publishes all that was written before; wakes whoever waits for the word. Throws in a forked
  // child.
  void publish(uint64_t word, uint64_t value);
  void close() { memory_.close(); }
  // Keeps something else until no process maps the tensor any more.
  void keep(std::shared_ptr<void> other) { memory_.keep(std::move(other)); }

 private:
  const uint64_t fork_generation_ = fork_generation();
  at::Tensor tensor_;
  transport::WindowMemory memory_;
};

// Another process's.
class OpenedTensor {
 public:
  // who: the owner, in errors.
  OpenedTensor(const std::string& address, std::string who, Milliseconds timeout);

  const std::shared_ptr<transport::OpenedWindow>& opened() const { return opened_; }
  pid_t pid() const { return opened_->process().pid(); }
  bool is_open() const;
  uint64_t load(uint64_t word) const;
  // Whether the word is at least `value` within the timeout. Throws Error(kPeerFailed) if the owner
  // has ended or closed its tensor before.
  bool wait(uint64_t word, uint64_t value, Milliseconds timeout) const;
  // The bytes, in place, for as long as the tensor lives; uint8.
  at::Tensor bytes();

 private:
  std::string who_;
  std::shared_ptr<transport::OpenedWindow> opened_;
};

// As core/window.h; offsets are elements of the window.
class TensorWindow {
 public:
  // others: by rank, null for this one and for those on other hosts. service: null if there are
  // none; otherwise its ranks are this window's, which it knows by this number.
  TensorWindow(std::shared_ptr<ExposedTensor> own, int rank,
               const std::vector<std::shared_ptr<OpenedTensor>>& others, int num_channels,
               Milliseconds timeout, std::shared_ptr<hosts::WindowService> service,
               uint64_t number);
  ~TensorWindow() { close(); }

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(others_.size()); }

  void put(const at::Tensor& tensor, int rank, int64_t offset);
  void get(const at::Tensor& tensor, int rank, int64_t offset);
  void accumulate(const at::Tensor& tensor, int rank, int64_t offset,
                  const std::optional<WireFormat>& wire);
  // The rank's tensor, in place.
  at::Tensor view(int rank);

  void signal(int rank, int channel) { window()->signal(rank, channel); }
  void wait_signal(int rank, int channel, std::optional<Milliseconds> timeout);
  int wait_any_signal(const std::vector<int>& ranks, int channel,
                      std::optional<Milliseconds> timeout);
  uint64_t num_signals(int rank, int channel) const { return window()->num_signals(rank, channel); }
  bool is_alive(int rank) const { return window()->is_alive(rank); }

  // Later calls here fail, as do others' accesses to this rank. Idempotent.
  void close();

 private:
  bool is_of_parent() const { return fork_generation_ != fork_generation(); }
  // Throws Error(kInternal) once closed, and in a forked child. Callers keep it while they use it.
  std::shared_ptr<Window> window() const;
  void check(std::string_view call, const at::Tensor& tensor, int64_t offset) const;
  // In memory that is no part of the rank's window, since what follows copies no overlaps.
  Packed packed_apart(const at::Tensor& tensor, Packed::Content content, int rank) const;

  const int rank_;
  const at::ScalarType dtype_;
  const std::vector<int64_t> shape_;
  const uint64_t fork_generation_;
  mutable std::mutex mutex_;            // guards those below
  std::shared_ptr<ExposedTensor> own_;  // null once closed, as the next two
  std::shared_ptr<Window> window_;
  std::shared_ptr<hosts::RemoteWindow> remote_;  // null if all ranks are on this host
  std::vector<std::shared_ptr<OpenedTensor>> others_;
};

}  // namespace rota::tensors
