// SPDX-License-Identifier: Apache-2.0
// The entry points of one target for libFuzzer. build.mk compiles this file once for each target, with its name.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {
namespace {

constexpr const Target* kTarget = find_target(BCP_FUZZ_TARGET);
static_assert(kTarget != nullptr, "no target " BCP_FUZZ_TARGET);

}  // namespace
}  // namespace bytecheckpoint::fuzz

extern "C" size_t LLVMFuzzerMutate(uint8_t* bytes, size_t size, size_t max_size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using namespace bytecheckpoint::fuzz;  // NOLINT
  const std::string fault = kTarget->property({reinterpret_cast<const char*>(bytes), size});
  if (fault.empty()) return 0;
  std::fprintf(stderr, "%s: does not hold: %s\n", BCP_FUZZ_TARGET, fault.c_str());
  std::abort();
}

namespace bytecheckpoint::fuzz {
namespace {

/// Changes a part by libFuzzer's own mutations.
class LibFuzzerChange : public Change {
 public:
  explicit LibFuzzerChange(unsigned seed) : random_(seed) {}

  std::string operator()(std::string_view part, size_t max_bytes) override {
    if (max_bytes == 0) return {};
    std::string bytes(part.substr(0, max_bytes));
    const size_t size = bytes.size();
    bytes.resize(max_bytes);
    bytes.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(bytes.data()), size, max_bytes));
    return bytes;
  }
  size_t below(size_t limit) override { return random_() % limit; }

 private:
  std::minstd_rand random_;
};

}  // namespace
}  // namespace bytecheckpoint::fuzz

/// One in four inputs is changed blindly, to test that parsers check the checksums.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* bytes, size_t size, size_t max_size, unsigned seed) {
  using namespace bytecheckpoint::fuzz;  // NOLINT
  LibFuzzerChange change(seed);
  if (kTarget->mutation == nullptr || change.below(4) == 0) return LLVMFuzzerMutate(bytes, size, max_size);
  const std::string made = kTarget->mutation({reinterpret_cast<const char*>(bytes), size}, max_size, &change);
  if (made.empty() || made.size() > max_size) return LLVMFuzzerMutate(bytes, size, max_size);
  std::memcpy(bytes, made.data(), made.size());
  return made.size();
}
