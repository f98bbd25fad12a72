// Works of coalesced calls: of several as one, and of one that is started later.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "base/timeout.h"

namespace rota::tensors {

class JointWork final : public ::c10d::Work {
 public:
  using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

  JointWork(int rank, std::vector<WorkPtr> works)
      : Work(rank, ::c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    bool are_all = true;
    for (const WorkPtr& work : works_) are_all &= work->isCompleted();
    return are_all;
  }

  bool isSuccess() const override {
    for (const WorkPtr& work : works_) {
      if (!work->isSuccess()) return false;
    }
    return true;
  }

  // Waits for each, in order; the first error ends the wait. The timeout applies to all together.
  bool wait(std::chrono::milliseconds own_timeout) override {
    const auto timeout = usable_timeout(own_timeout);
    const auto start = std::chrono::steady_clock::now();
    for (const WorkPtr& work : works_) {
      const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(
          std::chrono::steady_clock::now() - start);
      const auto least = std::chrono::milliseconds(1);
      work->wait(timeout == kNoTimeout ? timeout : std::max(timeout - passed, least));
    }
    return true;
  }

  // The calls start together, so the longest lasts until all are done.
  float getDuration() const override {
    float longest_ms = 0;
    for (const WorkPtr& work : works_) longest_ms = std::max(longest_ms, work->getDuration());
    return longest_ms;
  }

  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> results;
    for (const WorkPtr& work : works_) {
      const std::vector<at::Tensor> of_one = work->result();
      results.insert(results.end(), of_one.begin(), of_one.end());
    }
    return results;
  }

  // Holds the tensors of all.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const WorkPtr& work : works_) futures.push_back(work->getFuture());
    return c10::collectAll(futures)->then(
        [results = result()](c10::ivalue::Future& all) -> c10::IValue {
          for (const c10::IValue& value : all.value().toListRef()) value.toFuture()->value();
          return results;
        },
        c10::ListType::create(c10::TensorType::get()));
  }

 private:
  std::vector<WorkPtr> works_;
};

class PromisedWork final : public ::c10d::Work {
 public:
  using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

  PromisedWork(int rank, ::c10d::OpType op_type) : Work(rank, op_type) {}

  void keep(WorkPtr work) { work_ = std::move(work); }

  bool wait(std::chrono::milliseconds timeout) override { return kept().wait(timeout); }
  void synchronize() override { kept().synchronize(); }
  bool isCompleted() override { return work_ && work_->isCompleted(); }
  bool isSuccess() const override { return work_ && work_->isSuccess(); }
  std::vector<at::Tensor> result() override { return kept().result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return kept().getFuture(); }

 private:
  ::c10d::Work& kept() const {
    TORCH_CHECK(work_,
                "rota: messages of a coalescing block start when it ends; wait for them after it");
    return *work_;
  }

  WorkPtr work_;
};

}  // namespace rota::tensors
