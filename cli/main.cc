// The command line: pannier train | plan | doctor | bench.
#include <exception>
#include <iostream>

#include "cli/commands.h"
#include "pannier/base/error.h"

int main(int argc, char** argv) {
  CLI::App app("Pannier trains models whose training state does not fit in device memory.", "pannier");
  app.require_subcommand(1);
  app.set_version_flag("--version", PANNIER_VERSION);
  pannier::cli::add_train(app);
  pannier::cli::add_plan(app);
  pannier::cli::add_doctor(app);
  pannier::cli::add_bench(app);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const pannier::ConfigError& error) {
    std::cerr << "pannier: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "pannier: " << error.what() << '\n';
    return 1;
  }
}
