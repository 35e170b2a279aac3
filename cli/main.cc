// The command line: pannier train | plan | doctor | bench.
#include <cerrno>
#include <cstdio>
#include <exception>
#include <iostream>
#include <system_error>

#include "cli/commands.h"
#include "pannier/base/error.h"

namespace {

constexpr int kFailure = 1;
constexpr int kWrongUsage = 2;

// Runs what the arguments ask for, and returns the exit status.
int run(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kWrongUsage;  // Help and the version are "errors" of status 0.
  }
}

constexpr const char* kPrinting = "write standard output";

// What was printed may still be in buffers; only emptying them shows whether it arrived.
void require_printed() {
  const int earlier = errno;  // CLI11 empties the buffer after help and the version itself.
  errno = 0;
  std::cout.flush();
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0 || !std::cout) {
    throw pannier::IoError(kPrinting, errno != 0 ? errno : earlier != 0 ? earlier : EIO);
  }
}

int fail(const std::exception& error, int status) {
  std::cerr << "pannier: " << error.what() << '\n';
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Pannier trains models whose training state does not fit in device memory.", "pannier");
  app.require_subcommand(1);
  app.set_version_flag("--version", PANNIER_VERSION);
  app.footer(
      "Exit status:\n  0  success\n  1  failure, such as a plan that does not fit or a file that can't be read\n"
      "  2  wrong usage: flags, or a configuration that can't be");
  pannier::cli::add_train(app);
  pannier::cli::add_plan(app);
  pannier::cli::add_doctor(app);
  pannier::cli::add_bench(app);
  pannier::cli::add_checkpoint(app);
  try {
    const int status = run(app, argc, argv);
    require_printed();
    return status;
  } catch (const pannier::ConfigError& error) {
    return fail(error, kWrongUsage);
  } catch (const std::system_error& error) {  // Of fmt::print, where the buffer was full before the end.
    return std::ferror(stdout) == 0 ? fail(error, kFailure)
                                    : fail(pannier::IoError(kPrinting, error.code().value()), kFailure);
  } catch (const std::exception& error) {
    return fail(error, kFailure);
  }
}
