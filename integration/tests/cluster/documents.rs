//! Blocks of commands in documents that begin with ```` ```sh run ````. `integration/documents/run` runs each one as on a
//! new machine, with the default directories.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coracle_integration::{Machine, ResourceSnapshot, on_a_machine, repository};

/// Commands of a document.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    /// What the block needs, as options of `integration/documents/run`: `--cluster` for `sh run cluster`.
    options: Vec<String>,
    commands: String,
}

/// The blocks that begin with `sh run`. `a_block_of_commands_is_run_or_says_why_not` checks the words that follow.
fn runnable_blocks(text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    let (mut is_in_a_block, mut indentation) = (false, 0);
    for line in text.lines() {
        let content = line.trim_start();
        let Some(first) = content.strip_prefix("```") else {
            if let Some(block) = &mut open {
                // Deeper lines stay indented: a here-document may contain YAML.
                block.commands.push_str(line.get(indentation..).unwrap_or_default());
                block.commands.push('\n');
            }
            continue;
        };
        blocks.extend(open.take());
        is_in_a_block = !is_in_a_block;
        let needs = first.strip_prefix("sh run").filter(|_| is_in_a_block);
        if let Some(needs) = needs {
            indentation = line.len() - content.len();
            let options = needs.split_whitespace().map(|need| format!("--{need}")).collect();
            open = Some(Block { options, commands: String::new() });
        }
    }
    blocks
}

/// All runnable blocks, with their pages.
fn blocks_of_documents() -> Vec<(PathBuf, Block)> {
    let docs = fs::read_dir(repository().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<PathBuf> = docs.filter(|path| path.extension().is_some_and(|e| e == "md")).collect();
    pages.push(repository().join("README.md"));
    pages.sort();
    let blocks = pages.into_iter().flat_map(|page| {
        let blocks = runnable_blocks(&fs::read_to_string(&page).unwrap());
        blocks.into_iter().map(move |block| (page.clone(), block))
    });
    blocks.collect()
}

#[test]
fn marked_blocks_are_found() {
    let text = "```yaml\na: b\n```\n```sh run\ncoracle check\n```\n1. x\n   ```sh run cluster\n   cat <<E\n     a: b\n   E\n   ```\n\
                ```sh not run: slow\nscripts/test\n```\n";
    let block = |options: &[&str], commands: &str| Block {
        options: options.iter().map(|option| (*option).to_owned()).collect(),
        commands: commands.to_owned(),
    };
    let expected = [block(&[], "coracle check\n"), block(&["--cluster"], "cat <<E\n  a: b\nE\n")];
    assert_eq!(runnable_blocks(text), expected);
}

/// Runs commands on a new machine with these options, and returns their output.
fn run<S: AsRef<OsStr>>(machine: &Machine, mirrors: &Path, options: &[S], commands: &str) -> String {
    let dir = tempfile::tempdir_in(machine.path("")).unwrap();
    let file = dir.path().join("block.sh");
    fs::write(&file, commands).unwrap();
    let scratch = dir.path().join("scratch");
    fs::create_dir(&scratch).unwrap();
    let mut run = Command::new(repository().join("integration/documents/run"));
    run.arg(scratch).arg(Machine::coracle()).arg(Machine::kubectl("1.37")).args(options).arg(file);
    run.env("CORACLE_CGROUP_ROOT", format!("/{}", machine.name()))
        .env("CORACLE_REGISTRY_CONFIG_DIR", mirrors);
    // Prevents evictions and image garbage collection: the test machine may have little free disk space.
    run.env("CORACLE_DISK_FREE_PERCENT", "1").env("CORACLE_IMAGE_GC_HIGH_THRESHOLD", "100");
    let output = run.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{commands}{text}{errors}");
    text
}

#[test]
fn marked_blocks_run_and_leave_nothing() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let before = ResourceSnapshot::of(machine);
        let blocks = blocks_of_documents();
        assert!(blocks.len() >= 14, "{blocks:?}");
        for (page, block) in blocks {
            // The page is in the message of a failure.
            let commands = format!("# {}\n{}", page.display(), block.commands);
            run(machine, &mirrors, &block.options, &commands);
        }
        assert_eq!(ResourceSnapshot::of(machine).added_since(&before), Vec::<&str>::new());
    });
}

/// The directories are those of the table in `docs/install.md`.
#[test]
fn the_documented_directories_suffice_on_a_read_only_root() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let before = ResourceSnapshot::of(machine);
        let commands = "if touch /file || touch /etc/file || touch /run/file; then exit 9; fi\n\
                        kubectl create deployment web --image=nginx\n\
                        kubectl rollout status deployment/web --timeout=60s\n\
                        kubectl exec deployment/web -- true\n";
        let output = run(machine, &mirrors, &["--cluster", "--read-only"], commands);
        assert!(output.contains("successfully rolled out"), "{output}");
        assert_eq!(ResourceSnapshot::of(machine).added_since(&before), Vec::<&str>::new());
    });
}
