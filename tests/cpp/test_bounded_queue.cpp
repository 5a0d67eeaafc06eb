// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/bounded_queue.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

namespace bytecheckpoint::base {
namespace {

TEST_CASE("bounded_queue: first in is first out, of things that only move") {
  BoundedQueue<std::unique_ptr<int>> queue(3);
  for (int i = 0; i < 3; ++i) REQUIRE(queue.push(std::make_unique<int>(i)));
  for (int i = 0; i < 3; ++i) CHECK(**queue.pop() == i);
}

TEST_CASE("bounded_queue: closed, it declines what comes and drains what is there") {
  BoundedQueue<int> queue(4);
  REQUIRE(queue.push(1));
  REQUIRE(queue.push(2));
  queue.close();
  CHECK_FALSE(queue.push(3));
  CHECK(queue.pop() == 1);
  CHECK(queue.pop() == 2);
  CHECK_FALSE(queue.pop().has_value());
  CHECK_FALSE(queue.pop().has_value());
}

TEST_CASE("bounded_queue: a full queue makes its producer wait for the consumer") {
  BoundedQueue<int> queue(1);
  std::thread producer([&] {
    for (int i = 0; i < 100; ++i) queue.push(i);
    queue.close();
  });
  int expected = 0;
  while (const auto item = queue.pop()) CHECK(*item == expected++);
  producer.join();
  CHECK(expected == 100);
}

TEST_CASE("bounded_queue: close wakes those who wait to push and to pop") {
  BoundedQueue<int> full(1);
  BoundedQueue<int> empty(1);
  REQUIRE(full.push(0));
  std::atomic<int> declined{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] { declined += full.push(1) ? 0 : 1; });
    threads.emplace_back([&] { declined += empty.pop().has_value() ? 0 : 1; });
  }
  full.close();
  empty.close();
  for (std::thread& thread : threads) thread.join();
  CHECK(declined == 6);
}

TEST_CASE("bounded_queue: a wait with a limit ends with an item, with the end of the queue, or with nothing") {
  BoundedQueue<int> queue(2);
  bool is_over = true;
  CHECK_FALSE(queue.pop_for(std::chrono::milliseconds(1), &is_over).has_value());
  CHECK_FALSE(is_over);
  REQUIRE(queue.push(7));
  CHECK(queue.pop_for(std::chrono::milliseconds(1), &is_over) == 7);
  std::thread producer([&] { queue.push(8); });
  std::optional<int> item;
  while (!item.has_value()) item = queue.pop_for(std::chrono::milliseconds(1), &is_over);
  CHECK(item == 8);
  producer.join();
  REQUIRE(queue.push(9));
  queue.close();
  CHECK(queue.pop_for(std::chrono::milliseconds(1), &is_over) == 9);
  CHECK(is_over == false);
  CHECK_FALSE(queue.pop_for(std::chrono::milliseconds(1), &is_over).has_value());
  CHECK(is_over);
}

TEST_CASE("bounded_queue: many producers and consumers lose and double nothing") {
  constexpr int kProducers = 4, kConsumers = 3, kItems = 2000;
  BoundedQueue<int> queue(5);
  std::vector<std::atomic<int>> seen(kProducers * kItems);
  std::vector<std::thread> producers, consumers;
  for (int p = 0; p < kProducers; ++p) {
    producers.emplace_back([&queue, p] {
      for (int i = 0; i < kItems; ++i) queue.push(p * kItems + i);
    });
  }
  for (int c = 0; c < kConsumers; ++c) {
    consumers.emplace_back([&] {
      while (const auto item = queue.pop()) ++seen[static_cast<size_t>(*item)];
    });
  }
  for (std::thread& thread : producers) thread.join();
  queue.close();
  for (std::thread& thread : consumers) thread.join();
  int wrong = 0;
  for (const auto& count : seen) wrong += count == 1 ? 0 : 1;
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace bytecheckpoint::base
