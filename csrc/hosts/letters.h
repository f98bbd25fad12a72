// The short messages of one form that each rank takes from any other, in one thread: signs of life,
// deaths, failures, and the envelopes of sends.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "base/error.h"

namespace rota::hosts {

// What a send says of its data, which follows with a tag of its own.
struct Envelope {
  int64_t tag = 0;  // the caller's
  uint64_t dtype = 0;
  uint64_t num_elems = 0;
  int64_t data_tag = 0;

  size_t num_bytes() const { return num_elems * info(static_cast<DType>(dtype)).num_bytes; }
  bool has_length_of(const Envelope& other) const {
    return dtype == other.dtype && num_elems == other.num_elems;
  }
  std::string to_string() const {
    return join(name(static_cast<DType>(dtype)), '[', num_elems, ']');
  }
};

struct Letter {
  enum class Kind : uint64_t { kAlive, kLeft, kDied, kFailed, kEnvelope };

  Kind kind = Kind::kAlive;
  int64_t dead = 0;                    // of kDied: a rank of the sender's host
  uint64_t completed = 0;              // of kAlive, kDied: the last call that the sender, or the
                                       // dead rank, has done its part of
  ErrorKind error = ErrorKind::kNone;  // of kFailed, as the next one
  uint64_t has_cause = 0;              // as Error's
  Envelope envelope;                   // of kEnvelope
  std::array<char, 440> text{};        // of kFailed, or the dead rank's name; zero-terminated
};

}  // namespace rota::hosts
