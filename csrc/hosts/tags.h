// The tags of messages between hosts. The engine is rota's alone.
#pragma once

#include <cstdint>

namespace rota::hosts {

inline constexpr int kLetterTag = 0;
inline constexpr int kGreetingTag = 1;      // a call, to be compared
inline constexpr int kContributionTag = 2;  // what a rank's partner sums
inline constexpr int kResultTag = 3;        // what is final

// Windows have one tag for each service over an engine, so that none takes another's packets.
inline constexpr int kFirstWindowTag = 1 << 26;

// Sends take the tags of their data in turn, so that recvs at the same time do not mix them up.
inline constexpr int64_t kFirstDataTag = 16;
inline constexpr int64_t kNumDataTags = 1 << 24;

}  // namespace rota::hosts
