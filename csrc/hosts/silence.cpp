#include "hosts/silence.h"

#include <cstdlib>

#include "base/error.h"

namespace rota::hosts {
namespace {

using std::chrono::milliseconds;

// With the sign that is due and the network's delay, 2 s (DESIGN.md's contract).
constexpr milliseconds kSilence{1500};
// In place of it, for ranks that may stand still for longer, as in a debugger or beside many
// others.
constexpr const char* kSilenceVariable = "ROTA_HOST_SILENCE_MS";

}  // namespace

milliseconds longest_silence() {
  const char* text = std::getenv(kSilenceVariable);
  if (text == nullptr) return kSilence;
  const long value = std::strtol(text, nullptr, 10);
  if (value > 0) return milliseconds(value);
  throw Error(ErrorKind::kValue, join("rota: ", kSilenceVariable, " is '", text,
                                      "', expected a positive number of milliseconds"));
}

}  // namespace rota::hosts
