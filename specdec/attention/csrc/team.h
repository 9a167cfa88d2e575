// The threads of one call, and how they wait for each other.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

namespace dh {

constexpr int kSpins = 1000;  // some ten microseconds

// Sense-reversing barrier that spins: phases of a forward take microseconds. After a while it yields, so
// that more threads than cores stay slow instead of stuck.
class Barrier {
 public:
  void wait(int size) {
    if (size == 1) return;
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins > kSpins) {
        sched_yield();
      } else {
#if defined(__x86_64__)
        _mm_pause();
#endif
      }
    }
  }

 private:
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

struct Member {
  int index;
  int size;
  Barrier* barrier;

  void sync() const { barrier->wait(size); }

  // This member's share [first, last) of `count` equal pieces, contiguous.
  void share(int64_t count, int64_t* first, int64_t* last) const {
    *first = count * index / size;
    *last = count * (index + 1) / size;
  }
};

// Runs `body(member)` on `num_threads` threads at once. The team may come out smaller than asked for.
template <typename Body>
void run_team(int num_threads, const Body& body) {
  Barrier barrier;
#if defined(_OPENMP)
  if (num_threads > 1) {
#pragma omp parallel num_threads(num_threads)
    body(Member{omp_get_thread_num(), omp_get_num_threads(), &barrier});
    return;
  }
#endif
  body(Member{0, 1, &barrier});
}

}  // namespace dh
