//! Tests that every subcommand and flag in documents, services and workflows exists.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory as _};

use crate::CommandLine;

/// Flags of other programs that documents mention without their program.
const FOREIGN_FLAGS: [(&str, &str); 3] = [
    ("enable-logs-handler", "kube-apiserver"),
    ("max-request-bytes", "etcd"),
    ("use-service-account-credentials", "kube-controller-manager"),
];

/// A document with the text of its code spans, and the lines of its code blocks.
struct Document {
    name: String,
    spans: Vec<String>,
    lines: Vec<String>,
}

// === impl Document ===

impl Document {
    fn parse(name: &str, text: &str) -> Self {
        let (mut spans, mut lines, mut fenced) = (Vec::new(), Vec::new(), false);
        // A backslash at the end of a line continues the command.
        for line in text.replace("\\\n", " ").lines() {
            if line.trim_start().starts_with("```") {
                fenced = !fenced;
            } else if fenced || line.starts_with("    ") {
                lines.push(line.trim().to_owned());
            } else {
                spans.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
            }
        }
        Self { name: name.to_owned(), spans, lines }
    }

    /// A file of commands: a service or a workflow.
    fn of_commands(name: &str, text: &str) -> Self {
        let lines = text.replace("\\\n", " ").lines().map(|line| line.trim().to_owned()).collect();
        Self { name: name.to_owned(), spans: Vec::new(), lines }
    }

    /// The problems of the document: subcommands and flags that do not exist.
    fn problems(&self, definition: &Command) -> Vec<String> {
        let commands = self.spans.iter().chain(&self.lines).filter_map(|text| invalid(text, definition));
        let known = all_flags(definition);
        let flags = self.spans.iter().filter_map(|span| flag(span));
        let is_foreign = |name: &str| FOREIGN_FLAGS.iter().any(|(other, _)| *other == name);
        let unknown = flags.filter(|name| !known.contains(*name) && !is_foreign(name));
        let unknown = unknown.map(|name| format!("--{name} is a flag of no subcommand"));
        commands.chain(unknown).map(|problem| format!("{}: {problem}", self.name)).collect()
    }
}

/// The name of the flag at the beginning of a text.
fn flag(text: &str) -> Option<&str> {
    let name = text.strip_prefix("--")?.split([' ', '=', ',', '[']).next()?;
    name.starts_with(|c: char| c.is_ascii_lowercase()).then_some(name)
}

fn flags(command: &Command) -> impl Iterator<Item = &str> {
    let names = command.get_arguments().flat_map(|argument| {
        argument.get_long().into_iter().chain(argument.get_all_aliases().unwrap_or_default())
    });
    names.chain(["help", "version"])
}

fn all_flags(command: &Command) -> BTreeSet<&str> {
    flags(command).chain(command.get_subcommands().flat_map(all_flags)).collect()
}

/// The problem of a command line of coracle. None if it is correct, or if the text is not such a command line.
fn invalid(line: &str, definition: &Command) -> Option<String> {
    let line = ["$ ", "ExecStart=", "run: "].iter().fold(line, |line, start| line.trim_start_matches(start));
    let line = line.split(" #").next()?.split(['|', '&', ';', '>']).next()?;
    let mut words = line.split_whitespace().skip_while(|word| *word == "sudo").peekable();
    let program = Path::new(words.next()?).file_name()?;
    if program != "coracle" {
        return None;
    }
    let mut command = definition;
    while let Some(word) = words.next_if(|word| !word.starts_with("--")) {
        match command.find_subcommand(word) {
            Some(subcommand) => command = subcommand,
            None if command.has_subcommands() => {
                return Some(format!("`{line}`: there is no subcommand {word}"));
            }
            None => break,
        }
    }
    let unknown = words.filter_map(flag).find(|name| !flags(command).any(|known| known == *name))?;
    Some(format!("`{line}`: {} has no flag --{unknown}", command.get_name()))
}

fn definition() -> Command {
    let mut definition = CommandLine::command();
    // Passes global flags on to subcommands.
    definition.build();
    definition
}

fn documents() -> Vec<Document> {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut paths =
        vec![root.join("README.md"), root.join("ARCHITECTURE.md"), root.join("examples/README.md")];
    for folder in ["docs", "docs/decisions", ".github"] {
        let entries = fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path());
        paths.extend(entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    }
    let text = |path: &PathBuf| fs::read_to_string(path).unwrap();
    let pages = paths.iter().map(|path| Document::parse(path.to_str().unwrap(), &text(path)));
    let examples = ["ci/workflow.yaml", "systemd/coracle.service", "systemd/coracle-agent.service"];
    let examples = examples.map(|name| root.join("examples").join(name));
    let of_commands = examples.iter().map(|path| Document::of_commands(path.to_str().unwrap(), &text(path)));
    pages.chain(of_commands).collect()
}

#[test]
#[cfg(feature = "controlplane")]
fn subcommands_and_flags_that_documents_mention_exist() {
    let (definition, documents) = (definition(), documents());
    let wrong: Vec<String> = documents.iter().flat_map(|document| document.problems(&definition)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for (name, program) in FOREIGN_FLAGS {
        let is_used =
            documents.iter().flat_map(|document| &document.spans).any(|span| flag(span) == Some(name));
        assert!(is_used, "no document mentions --{name} of {program}: remove it from the list");
    }
}

#[test]
fn every_visible_subcommand_is_in_the_readme_or_the_installation_page() {
    let mentioned: Vec<String> = documents()
        .into_iter()
        .filter(|document| document.name.ends_with("README.md") || document.name.ends_with("install.md"))
        .flat_map(|document| document.spans.into_iter().chain(document.lines))
        .collect();
    for command in definition().get_subcommands().filter(|command| !command.is_hide_set()) {
        let words = format!("coracle {}", command.get_name());
        let is_mentioned =
            command.get_name() == "version" || mentioned.iter().any(|text| text.contains(&words));
        assert!(is_mentioned, "{words} is not documented");
    }
}

#[test]
fn a_mention_that_does_not_exist_is_found() {
    let definition = definition();
    let problems = |text: &str| Document::parse("page", text).problems(&definition);
    for right in [
        "`coracle agent --join URL --node-name a`",
        "    $ coracle image rm nginx --log-level debug &",
        "    sudo target/coracle agent \\\n        --max-pods=5   # --no-flag",
        "```\ncoracle cni install DIR --force\n```",
        "`systemctl stop coracle`, `--max-pods 5`, `--container-log-max-size`, `scripts/test --all`, `--`",
    ] {
        assert_eq!(problems(right), Vec::<String>::new(), "{right}");
    }
    let service = "[Service]\nExecStart=/usr/bin/coracle agent --jion\n    run: sudo coracle agent --max-pod 5\nTasksMax=infinity";
    assert_eq!(
        Document::of_commands("file", service).problems(&definition),
        [
            "file: `/usr/bin/coracle agent --jion`: agent has no flag --jion",
            "file: `sudo coracle agent --max-pod 5`: agent has no flag --max-pod"
        ]
    );
    for (text, problem) in [
        ("`coracle start`", "page: `coracle start`: there is no subcommand start"),
        ("    coracle image push x", "page: `coracle image push x`: there is no subcommand push"),
        (
            "`coracle image list --max-pods 5`",
            "page: `coracle image list --max-pods 5`: list has no flag --max-pods",
        ),
        (
            "    coracle agent \\\n  --jion URL",
            "page: `coracle agent    --jion URL`: agent has no flag --jion",
        ),
        ("ends with `--max-pod`", "page: --max-pod is a flag of no subcommand"),
    ] {
        assert_eq!(problems(text), [problem], "{text}");
    }
}
