// The tags of messages between hosts.
#pragma once

#include <cstdint>

namespace rota::tensors {

// A send's envelope has the tag that its caller gave, which must be below this. Its data has the
// next tag of these, in turn, which the envelope names.
inline constexpr int64_t kFirstDataTag = 1 << 28;
inline constexpr int64_t kNumDataTags = 1 << 24;

inline constexpr int kNoticeTag = 1 << 29;            // signs of life
inline constexpr int kGreetingTag = kNoticeTag + 1;      // a call, to be compared
inline constexpr int kContributionTag = kNoticeTag + 2;  // what a rank's partner sums
inline constexpr int kResultTag = kNoticeTag + 3;        // what is final
inline constexpr int kLengthTag = kNoticeTag + 4;        // of a part, to be compared

}  // namespace rota::tensors
