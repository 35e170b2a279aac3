// The subcommands of the pannier program. Each adds its flags to the parser and runs when it was chosen.
#pragma once

#include <CLI/CLI.hpp>

namespace pannier::cli {

void add_train(CLI::App& app);
void add_plan(CLI::App& app);
void add_doctor(CLI::App& app);
void add_bench(CLI::App& app);
void add_checkpoint(CLI::App& app);

}  // namespace pannier::cli
