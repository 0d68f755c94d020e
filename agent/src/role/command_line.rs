//! `coracle completion` and `coracle man`: shell completions and man pages, generated from the command line definition.

#[cfg(test)]
mod documents;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Command, ValueEnum};
use clap_complete::aot::{Bash, Fish, Generator, Zsh};

/// Arguments of `coracle completion`.
#[derive(Args)]
pub(crate) struct CompletionArguments {
    /// The shell
    shell: Shell,
}

/// Arguments of `coracle man`.
#[derive(Args)]
pub(crate) struct ManArguments {
    /// Directory of the pages; it is created if it does not exist
    dir: PathBuf,
}

/// Shells with completions.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// The last sections of each man page. `docs/command-line.md` has the same exit statuses.
const LAST_SECTIONS: &str = r#".SH "EXIT STATUS"
.TP
0
Success. A service ended after SIGINT or SIGTERM.
.TP
1
Failure. Standard error has one sentence with the operation, the object and the cause.
.TP
2
The command line is wrong.
.TP
78
\fBcoracle agent\fR: this machine has not joined a cluster.
.SH ENVIRONMENT
Each setting is also an environment variable: \fBCORACLE_MAX_PODS\fR is \fB\-\-max\-pods\fR. A flag takes precedence over a
variable, and a variable over the configuration file. \fBNO_COLOR\fR disables colours and progress.
.SH FILES
.TP
\fI/etc/coracle/config.toml\fR
Settings
.TP
\fI/var/lib/coracle\fR
Images, volumes, pods, objects of the cluster, keys
.TP
\fI/run/coracle\fR
Sockets and records that a boot removes
.SH "SEE ALSO"
\fBcoracle\fR(1), \fBkubectl\fR(1)
"#;

/// Prints the completions of a shell.
pub(crate) fn completion(arguments: &CompletionArguments, definition: &Command) -> anyhow::Result<ExitCode> {
    super::print(&completions(arguments.shell, definition)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a page for the program and one for each subcommand.
pub(crate) fn man(arguments: &ManArguments, definition: &Command) -> anyhow::Result<ExitCode> {
    write_pages(&arguments.dir, definition)?;
    Ok(ExitCode::SUCCESS)
}

fn completions(shell: Shell, definition: &Command) -> anyhow::Result<String> {
    let mut public = public(definition);
    public.set_bin_name("coracle");
    public.build();
    let mut text = Vec::new();
    match shell {
        Shell::Bash => Bash.try_generate(&public, &mut text),
        Shell::Zsh => Zsh.try_generate(&public, &mut text),
        Shell::Fish => Fish.try_generate(&public, &mut text),
    }
    .context("cannot generate the completions")?;
    String::from_utf8(text).context("cannot generate the completions")
}

fn write_pages(dir: &Path, definition: &Command) -> anyhow::Result<()> {
    let context = || format!("cannot write the man pages to {}", dir.display());
    std::fs::create_dir_all(dir).with_context(context)?;
    let mut public = public(definition);
    public.build();
    write_page(dir, public).with_context(context)
}

/// Writes the page of a command and the pages of its subcommands.
fn write_page(dir: &Path, command: Command) -> std::io::Result<()> {
    for subcommand in command.get_subcommands().cloned() {
        write_page(dir, subcommand)?;
    }
    let source = concat!("coracle ", env!("CARGO_PKG_VERSION"));
    let page = clap_mangen::Man::new(command).source(source);
    let mut text = Vec::new();
    page.render(&mut text)?;
    text.extend_from_slice(LAST_SECTIONS.as_bytes());
    std::fs::write(dir.join(page.get_filename()), text)
}

/// The definition without hidden subcommands, which the node starts itself. The generators of completions would
/// include them.
fn public(definition: &Command) -> Command {
    let about = definition.get_about().cloned().unwrap_or_default();
    Command::new("coracle")
        .version(env!("CARGO_PKG_VERSION"))
        .about(about)
        .disable_help_subcommand(true)
        .args(definition.get_arguments().cloned())
        .subcommands(definition.get_subcommands().filter(|command| !command.is_hide_set()).cloned())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use clap::CommandFactory as _;

    use super::*;
    use crate::CommandLine;

    /// The completions for fish: one line for each subcommand and flag.
    fn fish() -> String {
        completions(Shell::Fish, &CommandLine::command()).unwrap()
    }

    /// Every subcommand that users see, as its words.
    fn commands(of: &Command, words: &[String], all: &mut Vec<(Vec<String>, Command)>) {
        for command in of.get_subcommands().filter(|command| !command.is_hide_set()) {
            let words = [words, &[command.get_name().to_owned()]].concat();
            commands(command, &words, all);
            all.push((words, command.clone()));
        }
    }

    fn all_commands() -> Vec<(Vec<String>, Command)> {
        let mut all = Vec::new();
        commands(&CommandLine::command(), &[], &mut all);
        assert!(all.iter().any(|(words, _)| words.join(" ") == "image pull"));
        all
    }

    #[test]
    fn the_definition_of_the_command_line_is_consistent() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn each_shell_completes_every_subcommand_and_flag() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let text = completions(shell, &CommandLine::command()).unwrap();
            for (words, command) in all_commands() {
                assert!(text.contains(&words[words.len() - 1]), "{shell:?}: {words:?}");
                for flag in command.get_arguments().filter_map(clap::Arg::get_long) {
                    assert!(text.contains(flag), "{shell:?}: {words:?} --{flag}");
                }
            }
        }
    }

    #[test]
    fn internal_subcommands_are_neither_completed_nor_documented() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            assert!(!completions(shell, &CommandLine::command()).unwrap().contains("shim"), "{shell:?}");
        }
        let dir = tempfile::tempdir().unwrap();
        write_pages(dir.path(), &CommandLine::command()).unwrap();
        assert!(!dir.path().join("coracle-shim.1").exists());
    }

    #[test]
    fn flags_of_the_node_have_a_heading_of_their_own() {
        let definition = CommandLine::command();
        let agent = definition.find_subcommand("agent").unwrap();
        let heading = |flag: &str| {
            let argument = agent.get_arguments().find(|argument| argument.get_long() == Some(flag)).unwrap();
            argument.get_help_heading().map(str::to_owned)
        };
        assert_eq!(heading("max-pods").as_deref(), Some("Node options"));
        assert_eq!((heading("join"), heading("state-dir")), (None, None));
    }

    #[test]
    fn flags_of_files_complete_paths() {
        let lines = fish();
        let completes_paths = |flag: &str| {
            let line = lines.lines().find(|line| line.contains(&format!("-l {flag} "))).unwrap();
            line.ends_with("-F") || line.contains(" -F ")
        };
        assert!(completes_paths("audit-policy-file"));
        assert!(!completes_paths("max-pods"));
    }

    #[test]
    fn each_subcommand_has_a_page_that_names_its_flags() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("new/man1");
        write_pages(&pages, &CommandLine::command()).unwrap();
        let mut expected = BTreeSet::from(["coracle.1".to_owned()]);
        for (words, command) in all_commands() {
            let name = format!("coracle-{}.1", words.join("-"));
            let page = fs::read_to_string(pages.join(&name)).unwrap().replace('\\', "");
            for flag in command.get_arguments().filter_map(clap::Arg::get_long) {
                assert!(page.contains(&format!("--{flag}")), "{name}: --{flag}");
            }
            assert!(
                page.contains(".SH \"EXIT STATUS\"") && page.contains("/etc/coracle/config.toml"),
                "{name}"
            );
            expected.insert(name);
        }
        let written = fs::read_dir(&pages).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        assert_eq!(written.collect::<BTreeSet<_>>(), expected);
    }

    #[test]
    fn pages_have_no_date_so_that_packages_are_reproducible() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let pages = dirs.each_ref().map(|dir| {
            write_pages(dir.path(), &CommandLine::command()).unwrap();
            fs::read_to_string(dir.path().join("coracle-up.1")).unwrap()
        });
        assert_eq!(pages[0], pages[1]);
        let title = pages[0].lines().find(|line| line.starts_with(".TH")).unwrap();
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(title.trim_end(), format!(".TH coracle-up 1  \"coracle {version}\""));
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_named_in_the_error() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = write_pages(&file.join("man1"), &CommandLine::command()).unwrap_err();
        assert!(error.to_string().contains("file/man1"), "{error:#}");
    }
}
