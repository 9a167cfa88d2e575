// Threads that run a program together, phase by phase.
//
// A phase is cut into as many shares as there are threads. Each thread takes its own share, then those that
// nobody has taken yet, and goes on to the next phase when all shares are done: it waits for work in
// progress, never for a thread that is asleep or has lost its core. So a program is never much slower than
// on one thread, whatever else the machine does, and needs no OpenMP.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "team.h"

namespace dh {

// What a pool runs: phases in order.
class Phased {
 public:
  explicit Phased(int num_phases) : num_phases_(num_phases) {}
  virtual ~Phased() = default;
  Phased(const Phased&) = delete;
  Phased& operator=(const Phased&) = delete;

 protected:
  virtual void execute(int phase, const Share& share) = 0;

 private:
  friend class Pool;

  // Shares that are claimed and finished, counted over all runs: nothing is reset, so that a thread that
  // comes late, even in the middle of the next run, finds its own run finished.
  struct alignas(64) State {
    std::atomic<uint64_t> finished{0};
  };

  void resize(int num_shares) {
    num_shares_ = num_shares;
    run_.store(0);
    states_.reset(new State[num_phases_]);
    claims_.reset(new std::atomic<uint64_t>[size_t(num_phases_) * num_shares]());
  }

  void work(int thread) {
    const uint64_t run = run_.load(std::memory_order_acquire);
    const int num_shares = num_shares_;
    if (thread >= num_shares || run == 0) return;
    for (int phase = 0; phase < num_phases_; ++phase) {
      State& state = states_[phase];
      for (int i = 0, share = thread; i < num_shares; ++i, share = share + 1 < num_shares ? share + 1 : 0) {
        if (!claim(claims_[size_t(phase) * num_shares + share], run)) continue;
        execute(phase, Share{share, num_shares});
        state.finished.fetch_add(1, std::memory_order_acq_rel);
      }
      const uint64_t all = run * num_shares;
      spin_until([&] { return state.finished.load(std::memory_order_acquire) >= all; });
    }
  }

  static bool claim(std::atomic<uint64_t>& last_run, uint64_t run) {
    uint64_t seen = last_run.load(std::memory_order_relaxed);
    return seen < run && last_run.compare_exchange_strong(seen, run, std::memory_order_acq_rel);
  }

  const int num_phases_;
  int num_shares_ = 0;
  std::atomic<uint64_t> run_{0};
  std::unique_ptr<State[]> states_;
  std::unique_ptr<std::atomic<uint64_t>[]> claims_;
};

// One per process; its threads live as long as the process.
class Pool {
 public:
  static Pool& instance() {
    static Pool* pool = new Pool;
    return *pool;
  }

  // Runs all phases; the calling thread takes part. One run of a program at a time.
  void run(Phased& program, int num_threads) {
    if (num_threads == 1) {
      for (int phase = 0; phase < program.num_phases_; ++phase) program.execute(phase, Share{0, 1});
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    start_threads(num_threads - 1);
    if (program.num_shares_ != num_threads) {
      withdraw();
      program.resize(num_threads);
    }
    program.run_.fetch_add(1, std::memory_order_release);
    job_.store(&program);
    ticket_.fetch_add(1);
    ticket_.notify_all();
    program.work(0);
  }

  // After this no thread looks at any program that ran before: a late one may still have been passing through.
  void quiesce() {
    std::lock_guard<std::mutex> lock(mutex_);
    withdraw();
  }

 private:
  using Clock = std::chrono::steady_clock;

  // How long a thread looks out for the next run, at least and at most. It looks out longer where it has just
  // slept through a start that came soon: to be woken takes a round of a small model some twentieth of its
  // time, behind a gap of Python. Behind longer gaps others want the core, and it sleeps sooner.
  static constexpr std::chrono::microseconds kLeastPatience{100};
  static constexpr std::chrono::microseconds kMostPatience{400};

  void start_threads(int count) {
    for (; num_threads_ < count; ++num_threads_) std::thread(&Pool::serve, this, num_threads_ + 1).detach();
  }

  // No run is in progress.
  void withdraw() {
    job_.store(nullptr);
    spin_until([&] { return num_busy_.load() == 0; });
  }

  void serve(int thread) {
    uint32_t seen = 0;
    Clock::duration patience = kLeastPatience;
    while (true) {
      await(seen, patience);
      seen = ticket_.load();
      num_busy_.fetch_add(1);  // before looking at the job: see withdraw
      if (Phased* program = job_.load()) program->work(thread);
      num_busy_.fetch_sub(1);
    }
  }

  // Looks out for a while, since forwards follow each other closely, leaving the core to whoever else wants
  // it; then sleeps, and learns from how long that was.
  void await(uint32_t seen, Clock::duration& patience) const {
    const auto start = Clock::now();
    while (Clock::now() - start < patience) {
      for (int i = 0; i < 32; ++i) {
        if (ticket_.load(std::memory_order_acquire) != seen) return;
        relax();
      }
      sched_yield();
    }
    ticket_.wait(seen, std::memory_order_acquire);
    patience = Clock::now() - start <= kMostPatience ? kMostPatience : kLeastPatience;
  }

  std::mutex mutex_;
  int num_threads_ = 0;
  std::atomic<uint32_t> ticket_{0};
  std::atomic<Phased*> job_{nullptr};
  std::atomic<int> num_busy_{0};
};

}  // namespace dh
