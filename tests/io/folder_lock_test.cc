#include "pannier/io/folder_lock.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <string>

#include "pannier/base/error.h"
#include "pannier/io/process_files.h"
#include "tests/io/temporary_folder.h"

namespace pannier {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// A child that holds the folder until it is told to end, however.
class Holder {
 public:
  explicit Holder(const std::string& folder, bool handles_signals = false) {
    int ready[2] = {};
    EXPECT_EQ(::pipe(ready), 0);
    child_ = ::fork();
    if (child_ == 0) {
      const FolderLock lock(folder);
      if (handles_signals) {
        remove_named_files_on_signals();
      }
      std::ofstream(scratch_path(folder, 0)) << "left over";
      [[maybe_unused]] const auto written = ::write(ready[1], "x", 1);
      while (true) {
        ::pause();
      }
    }
    char byte = 0;
    EXPECT_EQ(::read(ready[0], &byte, 1), 1);
    ::close(ready[0]);
    ::close(ready[1]);
  }
  int end_by(int signal) {
    ::kill(child_, signal);
    int status = 0;
    ::waitpid(child_, &status, 0);
    child_ = 0;
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  }
  ~Holder() {
    if (child_ != 0) {
      end_by(SIGKILL);
    }
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;
  pid_t child() const { return child_; }

 private:
  pid_t child_ = 0;
};

TEST(FolderLock, RefusesASecondRunAndNamesTheFirst) {
  const TemporaryFolder folder;
  const Holder holder(folder.path());
  try {
    const FolderLock lock(folder.path(), {.wait_seconds = 0});
    FAIL() << "two runs hold one folder";
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), EBUSY);
    EXPECT_THAT(error.what(), AllOf(HasSubstr(folder.path()), HasSubstr("process " + std::to_string(holder.child())),
                                    HasSubstr("host")));
  }
}

TEST(FolderLock, TakesOverFromAKilledRunAndRemovesWhatItLeft) {
  const TemporaryFolder folder;
  Holder holder(folder.path());
  EXPECT_THAT(folder.names(), SizeIs(2));
  EXPECT_EQ(holder.end_by(SIGKILL), SIGKILL);
  std::ofstream(folder.path() + "/.pannier-00000000.lock") << "another boot's";
  std::ofstream(folder.path() + "/the user's own") << "stays";
  FolderLock lock(folder.path());
  EXPECT_EQ(lock.leftovers_removed(), 2);
  EXPECT_THAT(folder.names(), SizeIs(2));
  lock.release();
  EXPECT_THAT(folder.names(), ::testing::ElementsAre("the user's own"));
}

TEST(FolderLock, IsCountedInsideTheProcess) {
  const TemporaryFolder folder;
  FolderLock first(folder.path());
  FolderLock second(folder.path() + "/.");
  first.release();
  EXPECT_THAT(folder.names(), SizeIs(1));
  second.release();
  EXPECT_THAT(folder.names(), IsEmpty());
  EXPECT_THAT(FolderLock(folder.path()).lock_path(), HasSubstr(folder.path()));
}

TEST(FolderLock, IsNotHeldByForkedChildren) {
  const TemporaryFolder folder;
  FolderLock lock(folder.path());
  int hold[2] = {};
  ASSERT_EQ(::pipe(hold), 0);
  const pid_t worker = ::fork();
  if (worker == 0) {
    ::close(hold[1]);
    char byte = 0;
    [[maybe_unused]] const auto end = ::read(hold[0], &byte, 1);
    lock.release();
    std::_Exit(0);
  }
  lock.release();
  EXPECT_EQ(in_child([&] { return FolderLock(folder.path(), {.wait_seconds = 0}).lock_path().empty() ? 1 : 0; }), 0);
  ::close(hold[0]);
  ::close(hold[1]);
  ::waitpid(worker, nullptr, 0);
}

TEST(FolderLock, AWorkersEndLeavesItsParentsLock) {
  const TemporaryFolder folder;
  FolderLock lock(folder.path());
  EXPECT_EQ(in_child([&] {
              remove_named_files();
              lock.release();
              return 0;
            }),
            0);
  EXPECT_THAT(folder.names(), SizeIs(1));
}

TEST(FolderLock, LeavesNothingAfterASignal) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const TemporaryFolder folder;
    Holder holder(folder.path(), true);
    EXPECT_EQ(holder.end_by(signal), signal);
    // The child's mock of a scratch file is not one that an OwnedName holds.
    EXPECT_THAT(folder.names(), ::testing::ElementsAre(HasSubstr(".scratch")));
  }
}

TEST(FolderLock, LeavesNothingAfterExitWithoutDestructors) {
  const TemporaryFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    static const FolderLock* const leaked = new FolderLock(folder.path());
    std::exit(leaked->lock_path().empty() ? 1 : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(folder.names(), IsEmpty());
}

TEST(FolderLock, LeavesNothingAfterAnException) {
  const TemporaryFolder folder;
  try {
    const FolderLock lock(folder.path());
    throw IoError("something else", EIO);
  } catch (const IoError&) {
    EXPECT_THAT(folder.names(), IsEmpty());
  }
}

TEST(FolderLock, KnowsADeadScratchFileByItsName) {
  const std::string alive = scratch_path("/x", 3).substr(3);
  EXPECT_FALSE(is_dead_scratch_name(alive));
  EXPECT_FALSE(is_dead_scratch_name("model.safetensors"));
  EXPECT_FALSE(is_dead_scratch_name(".pannier-.scratch"));
  EXPECT_TRUE(is_dead_scratch_name(".pannier-00000000-1-1-rank0-1.scratch"));
  EXPECT_NE(scratch_path("/x", 3), scratch_path("/x", 3));
}

}  // namespace
}  // namespace pannier
