// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace bytecheckpoint::test {

/// Changes bytes as damage or an attacker would: flipped bits, extremes in fields, cuts, insertions, repetitions,
/// splices.
class Mutator {
 public:
  /// \param others  Source of spliced parts.
  /// \param tokens  Bytes with a meaning in the format, such as opcodes, to insert and to overwrite with.
  Mutator(uint64_t seed, std::vector<std::string> others, std::string tokens)
      : random_(seed), others_(std::move(others)), tokens_(std::move(tokens)) {}

  std::string operator()(std::string bytes) {
    for (size_t changes = 1 + below(3); changes != 0 && !bytes.empty(); --changes) change(&bytes);
    return bytes;
  }

  size_t below(size_t limit) { return random_() % limit; }

 private:
  void change(std::string* bytes) {
    const size_t at = below(bytes->size());
    const size_t length = 1 + below(std::min<size_t>(bytes->size() - at, below(2) == 0 ? 4 : 64));
    switch (below(9)) {
      case 0:
        (*bytes)[at] = static_cast<char>((*bytes)[at] ^ (1 << below(8)));
        break;
      case 1:
        (*bytes)[at] = static_cast<char>(random_());
        break;
      case 2:
        (*bytes)[at] = tokens_[below(tokens_.size())];
        break;
      case 3:
        bytes->insert(at, 1, tokens_[below(tokens_.size())]);
        break;
      case 4:
        bytes->erase(at, length);
        break;
      case 5:
        bytes->resize(at);
        break;
      case 6:
        bytes->insert(below(bytes->size()), bytes->substr(at, length));
        break;
      case 7:
        splice(bytes, at);
        break;
      default:
        overwrite_field(bytes, at);
    }
  }

  void splice(std::string* bytes, size_t at) {
    const std::string& other = others_[below(others_.size())];
    const size_t begin = below(other.size());
    bytes->replace(at, below(32), other, begin, below(64));
  }

  void overwrite_field(std::string* bytes, size_t at) {
    const uint64_t extremes[] = {0,
                                 1,
                                 0x7F,
                                 0x80,
                                 0xFF,
                                 0xFFFF,
                                 0x7FFFFFFF,
                                 0x80000000,
                                 0xFFFFFFFF,
                                 uint64_t{1} << 62,
                                 ~uint64_t{0} >> 1,
                                 ~uint64_t{0},
                                 bytes->size(),
                                 bytes->size() - at};
    const uint64_t value = extremes[below(std::size(extremes))];
    const size_t width = std::min<size_t>(size_t{1} << below(4), bytes->size() - at);
    std::memcpy(&(*bytes)[at], &value, width);
  }

  std::mt19937_64 random_;
  std::vector<std::string> others_;
  std::string tokens_;
};

}  // namespace bytecheckpoint::test
