// Rows that ranks, processes with a part of the model each, hand each other in the middle of a forward.
//
// Every rank writes its rows into a slot of its own; when all have, each takes everyone's, in the order of the
// ranks, so that sums are the same bits everywhere and every time. There are two sets of slots, used in turns:
// who writes into a set again has passed the meeting before, and so have all who read the set.
//
// On one machine the slots are in shared memory (specdec/model/parallel/shared_slots.py makes them). Between
// machines they are this process's own, and `exchange` brings the other ranks' rows.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>

#include "team.h"

namespace dh {

// Where one rank stands; in shared memory.
struct alignas(64) RankCell {
  std::atomic<uint32_t> arrived;  // number of the meeting at which it has arrived last
  std::atomic<uint32_t> sleepers;  // threads of other ranks that sleep until it arrives
};
static_assert(sizeof(RankCell) == 64 && std::atomic<uint32_t>::is_always_lock_free);

// Fills all slots of a set from this rank's, `bytes` each; returns not 0 when a peer is lost.
using Exchange = int32_t(int32_t set, int64_t bytes);

struct RankLink {
  int32_t rank;
  int32_t size;
  int32_t file;  // the shared memory's; -1: none, `exchange` is called
  int32_t timeout_ms;
  RankCell* cells;
  char* slots;  // [2, size] of slot_bytes
  int64_t slot_bytes;
  Exchange* exchange;
};

// A rank holds the lock of its byte of the file as long as it lives: the kernel releases it at its end.
inline bool rank_is_gone(int file, int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(file, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

class Meeting {
 public:
  explicit Meeting(const RankLink& link) : link_(link) {}

  int num_ranks() const { return link_.size; }
  char* slot(uint32_t number, int rank) const {
    return link_.slots + (int64_t(number & 1) * link_.size + rank) * link_.slot_bytes;
  }
  char* own_slot(uint32_t number) const { return slot(number, link_.rank); }
  bool is_shared() const { return link_.file >= 0; }

  // Returns whether everyone has arrived at meeting `number`; called once this rank's rows are in its slot, by
  // any number of its threads.
  bool meet(uint32_t number) const {
    arrive(number);
    for (int rank = 0; rank < link_.size; ++rank)
      if (rank != link_.rank && !await(rank, number)) return false;
    return true;
  }

  bool exchange(uint32_t number, int64_t bytes) const { return link_.exchange(int32_t(number & 1), bytes) == 0; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kPatience{200};
  static constexpr long kLookNs = 20'000'000;

  static bool is_before(uint32_t a, uint32_t b) { return int32_t(a - b) < 0; }

  void arrive(uint32_t number) const {
    RankCell& cell = link_.cells[link_.rank];
    uint32_t seen = cell.arrived.load(std::memory_order_relaxed);
    if (!is_before(seen, number)) return;
    if (!cell.arrived.compare_exchange_strong(seen, number, std::memory_order_seq_cst)) return;
    if (cell.sleepers.load(std::memory_order_seq_cst) != 0)
      syscall(SYS_futex, &cell.arrived, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Looks out for a while, since ranks are a few microseconds apart, then sleeps; false when the rank is gone or
  // does not arrive in time.
  bool await(int rank, uint32_t number) const {
    RankCell& cell = link_.cells[rank];
    const auto has_arrived = [&] { return !is_before(cell.arrived.load(std::memory_order_acquire), number); };
    const auto start = Clock::now();
    while (Clock::now() - start < kPatience) {
      for (int i = 0; i < 64; ++i) {
        if (has_arrived()) return true;
        relax();
      }
      sched_yield();
    }
    cell.sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool lost = false;
    while (!lost && !has_arrived()) {
      const uint32_t seen = cell.arrived.load(std::memory_order_seq_cst);
      if (!is_before(seen, number)) break;
      const timespec look = {0, kLookNs};
      syscall(SYS_futex, &cell.arrived, FUTEX_WAIT, seen, &look, nullptr, 0);
      const bool in_time = Clock::now() - start < std::chrono::milliseconds(link_.timeout_ms);
      // It may have arrived at its very last moment.
      lost = (!in_time || rank_is_gone(link_.file, rank)) && !has_arrived();
    }
    cell.sleepers.fetch_sub(1, std::memory_order_relaxed);
    return !lost;
  }

  const RankLink& link_;
};

}  // namespace dh
