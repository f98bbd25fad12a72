// The short messages of one form that each rank takes from any other, in one thread: signs of life,
// failures, and the envelopes of sends.
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
  enum class Kind : uint64_t { kAlive, kLeft, kFailed, kEnvelope };

  Kind kind = Kind::kAlive;
  ErrorKind error = ErrorKind::kNone;  // of kFailed, as the next one and the text
  uint64_t has_cause = 0;              // as Error's
  Envelope envelope;                   // of kEnvelope
  std::array<char, 456> text{};        // zero-terminated
};

}  // namespace rota::hosts
