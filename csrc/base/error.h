// The errors a caller can see. Each states fact, expected, got, next action; tensor/ and the
// bindings turn them into the Python exceptions of the same name.
#pragma once

#include <cstdint>
#include <cstring>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace rota {

enum class ErrorKind : uint64_t {
  kNone,        // value at rest of a region's abort word
  kInternal,    // RotaError: the group is unusable, or rota has a bug
  kPeerFailed,  // a peer died, left, or raised
  kTimeout,     // a peer did not arrive before the deadline
  kMismatch,    // ranks called different collectives
  kTransport,   // shared memory or bootstrap could not be set up
  kValue,       // an argument has an unusable value
  kType,        // an argument has an unusable type
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  // "prefix: cause". The cause names the rank that it is about, so ranks that hear of it from this
  // one pass on the cause alone, and no error is nested in another.
  Error(ErrorKind kind, const std::string& prefix, const std::string& cause)
      : std::runtime_error(prefix + ": " + cause), kind_(kind), cause_(cause) {}
  ErrorKind kind() const { return kind_; }
  // Whether other ranks are told the cause alone; otherwise that this rank has failed, and what().
  bool has_cause() const { return !cause_.empty(); }
  std::string told() const { return has_cause() ? cause_ : what(); }

 private:
  ErrorKind kind_;
  std::string cause_;
};

// A stream whose numbers any process can read, whatever locale the application has set for its own:
// one that groups digits writes 1,234, and reads 3,5 as one number.
template <typename Stream, typename... Args>
Stream in_classic_locale(Args&&... args) {
  Stream stream(std::forward<Args>(args)...);
  stream.imbue(std::locale::classic());
  return stream;
}

// Joins anything printable: join("rank ", 2, "/", 4).
template <typename... Parts>
std::string join(const Parts&... parts) {
  auto out = in_classic_locale<std::ostringstream>();
  (out << ... << parts);
  return out.str();
}

// "what: <text of errno>".
inline std::string with_errno(std::string_view what, int error_number) {
  return join(what, ": ", std::strerror(error_number));
}

[[noreturn]] inline void fail_transport(const std::string& what) {
  throw Error(ErrorKind::kTransport, "rota: " + what);
}

}  // namespace rota
