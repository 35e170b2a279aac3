// A folder that plays / for the probes: tests write the /proc and /sys files of any machine into it.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace pannier {

class FakeRoot {
 public:
  FakeRoot() {
    std::string name = (std::filesystem::temp_directory_path() / "pannier-root-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;
  ~FakeRoot() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }

  void write(const std::string& name, const std::string& text) const {
    const auto file = path_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace pannier
