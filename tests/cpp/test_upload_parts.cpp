// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/upload_parts.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

using namespace bytecheckpoint;
using io::UploadParts;

namespace {

constexpr int64_t kPart = 100;

/// Writes `text` in parts from several threads, each with one part at a time.
std::vector<base::Status> write_all(UploadParts* parts, const std::string& text) {
  const size_t count = (text.size() + kPart - 1) / kPart;
  std::vector<base::Status> outcomes(count);
  std::vector<std::thread> writers;
  for (size_t i = count; i-- > 0;) {  // the last part comes first
    writers.emplace_back([&, i] {
      const size_t begin = i * kPart, size = std::min<size_t>(kPart, text.size() - begin);
      outcomes[i] = parts->write(reinterpret_cast<const uint8_t*>(text.data()) + begin, static_cast<int64_t>(size),
                                 static_cast<int64_t>(begin));
    });
  }
  for (std::thread& writer : writers) writer.join();
  return outcomes;
}

}  // namespace

TEST_CASE("upload parts: come in order, and their writers wait until they are released") {
  for (const size_t size : {size_t{1}, size_t{100}, size_t{250}, size_t{800}}) {
    std::string text;
    for (size_t i = 0; i < size; ++i) text.push_back(static_cast<char>('a' + i % 26));
    UploadParts parts(kPart);
    std::string got;
    std::thread client([&] {
      std::vector<std::shared_ptr<const UploadParts::Part>> kept;  // as a client has several in flight
      while (auto part = parts.next()) {
        got.append(reinterpret_cast<const char*>(part->bytes), static_cast<size_t>(part->size));
        kept.push_back(std::move(part));
        if (kept.size() == 2) {
          parts.release(*kept.front());
          kept.erase(kept.begin());
        }
        if (got.size() == text.size()) {
          for (const auto& each : kept) parts.release(*each);
          kept.clear();
        }
      }
    });
    for (const base::Status& outcome : write_all(&parts, text)) CHECK(outcome.is_ok());
    parts.end();
    client.join();
    CHECK(got == text);
  }
}

TEST_CASE("upload parts: a failure ends all waits, whoever has the parts") {
  const std::string text(450, 'x');
  UploadParts parts(kPart);
  std::thread client([&] {
    const auto first = parts.next();
    const auto second = parts.next();
    parts.fail(base::Status::make(base::Code::kStorage, "put: refused"));
    parts.fail(base::Status::make(base::Code::kCancelled, "later"));
    CHECK(!parts.next());
    parts.release(*first);
    parts.release(*second);
  });
  for (const base::Status& outcome : write_all(&parts, text)) CHECK(outcome.message() == "put: refused");
  client.join();
  CHECK(parts.status().code() == base::Code::kStorage);
}
