//! The progress of long commands is shown on terminals only.

use std::fs::OpenOptions;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::{Command, ExitStatus, Stdio};

use coracle_integration::{Machine, on_a_cluster, on_a_machine};
use nix::fcntl::OFlag;
use nix::libc;
use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};

/// An import that shows its progress and then fails, because the file does not exist.
fn import(machine: &Machine) -> Command {
    let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
    let mut command = Command::new(Machine::coracle());
    command.args([
        "image",
        "import",
        "/no/such.tar",
        "--state-dir",
        &path("state"),
        "--run-dir",
        &path("run"),
    ]);
    command.env_remove("NO_COLOR").env("TERM", "xterm").stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Runs a command that fails with a terminal as its standard error. Returns what the terminal received.
fn on_a_terminal(command: Command) -> String {
    let shown = Shown::by(command);
    assert!(!shown.status.success(), "{:?}", shown.text);
    shown.text
}

/// Runs a command that succeeds with a terminal as its standard error. Returns what the terminal received.
fn success_on_a_terminal(command: Command) -> String {
    let shown = Shown::by(command);
    assert!(shown.status.success(), "{:?}", shown.text);
    shown.text
}

/// The end of a command whose standard error is a terminal.
struct Shown {
    status: ExitStatus,
    /// What the terminal received.
    text: String,
}

impl Shown {
    fn by(mut command: Command) -> Self {
        let mut master = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname_r(&master).unwrap();
        let terminal =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(name).unwrap();
        let mut child = command.stderr(terminal).spawn().unwrap();
        // The command has this process's last descriptors of the terminal. Without them a read fails with EIO after the
        // last byte of the child. The read must not wait for the end of the child: a full terminal blocks the child.
        drop(command);
        let mut received = Vec::new();
        let _ended = master.read_to_end(&mut received);
        let status = child.wait().unwrap();
        Self { status, text: String::from_utf8(received).unwrap() }
    }
}

/// The lines that replaced each other on the terminal.
fn lines(shown: &str) -> Vec<&str> {
    let lines = shown.split('\r').filter_map(|line| line.split_once("\u{1b}[K"));
    lines.map(|(line, _)| line).collect()
}

/// A node that shows its progress and then fails to join, because the API server does not exist.
fn join(machine: &Machine) -> Command {
    let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
    let hash = format!("sha256:{}", "0".repeat(64));
    let mut command = Command::new(Machine::coracle());
    command.args(["agent", "--join", "https://127.0.0.1:1", "--token", "abcdef.0123456789abcdef"]);
    command.args(["--ca-hash", &hash, "--state-dir", &path("state"), "--run-dir", &path("run")]);
    command.env_remove("NO_COLOR").env("TERM", "xterm").stdin(Stdio::null()).stdout(Stdio::null());
    command
}

#[test]
fn a_join_shows_what_it_waits_for() {
    on_a_machine(|machine| {
        let shown = on_a_terminal(join(machine));
        assert!(shown.contains("\rwaiting for the API server at https://127.0.0.1:1\u{1b}[K"), "{shown:?}");
        assert!(shown.contains("\r\u{1b}[Kcoracle: cannot reach the control plane at "), "{shown:?}");
        let piped = join(machine).stderr(Stdio::piped()).output().unwrap();
        let piped = String::from_utf8(piped.stderr).unwrap();
        assert!(
            piped.contains("cannot reach the control plane") && !piped.contains("waiting for"),
            "{piped:?}"
        );
    });
}

#[test]
fn progress_is_shown_on_terminals_only() {
    on_a_machine(|machine| {
        let shown = on_a_terminal(import(machine));
        assert!(shown.contains("\rimporting /no/such.tar\u{1b}[K"), "{shown:?}");
        assert!(shown.contains("\r\u{1b}[Kcoracle: cannot import /no/such.tar: "), "{shown:?}");

        let piped = import(machine).stderr(Stdio::piped()).output().unwrap();
        let piped = String::from_utf8(piped.stderr).unwrap();
        assert!(piped.contains("coracle: cannot import ") && !piped.contains('\u{1b}'), "{piped:?}");

        for (variable, value) in [("NO_COLOR", "1"), ("TERM", "dumb")] {
            let mut command = import(machine);
            command.env(variable, value);
            let plain = on_a_terminal(command);
            assert!(plain.contains("cannot import") && !plain.contains('\u{1b}'), "{variable}: {plain:?}");
        }
    });
}

/// Whether a line has this beginning, and then `N MB of N MB, M of M layers`.
fn shows_all_bytes(shown: &str, beginning: &str) -> bool {
    let same = |text: &str| text.split_once(" of ").is_some_and(|(done, total)| done == total);
    lines(shown).iter().any(|line| {
        let amounts = line.strip_prefix(beginning).and_then(|rest| rest.strip_suffix(" layers"));
        amounts
            .and_then(|rest| rest.split_once(", "))
            .is_some_and(|(bytes, layers)| same(bytes) && same(layers))
    })
}

#[test]
fn an_export_and_an_import_by_the_node_show_their_bytes_and_layers() {
    on_a_cluster(|machine, _| {
        let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
        let archive = path("busybox.tar");
        let image = |arguments: &[&str]| {
            let mut command = Command::new(Machine::coracle());
            command.arg("image").args(arguments).args([
                "--state-dir",
                &path("state"),
                "--run-dir",
                &path("run"),
            ]);
            command.env_remove("NO_COLOR").env("TERM", "xterm").stdin(Stdio::null()).stdout(Stdio::null());
            success_on_a_terminal(command)
        };
        image(&["pull", "busybox"]);
        let exported = image(&["export", "busybox", &archive]);
        assert!(shows_all_bytes(&exported, &format!("exporting busybox to {archive}: ")), "{exported:?}");
        let imported = image(&["import", &archive]);
        assert!(shows_all_bytes(&imported, &format!("importing {archive}: ")), "{imported:?}");
    });
}

#[test]
fn a_pull_shows_its_bytes_and_layers() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let path = |name: &str| machine.path(name).to_str().unwrap().to_owned();
        let mut command = Command::new(Machine::coracle());
        command.args(["image", "pull", "busybox", "--state-dir", &path("state"), "--run-dir", &path("run")]);
        command.env_remove("NO_COLOR").env("TERM", "xterm").env("CORACLE_REGISTRY_CONFIG_DIR", mirrors);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let shown = success_on_a_terminal(command);
        assert!(shows_all_bytes(&shown, ""), "{shown:?}");
        assert!(shown.ends_with("\r\u{1b}[K"), "the line is removed: {shown:?}");
    });
}

#[test]
fn a_removal_shows_the_number_of_removed_pods() {
    on_a_cluster(|_, cluster| {
        for name in ["one", "two"] {
            cluster.kubectl(&["run", name, "--image=busybox", "--command", "--", "sleep", "1000"]);
        }
        cluster.kubectl(&["wait", "pod", "--all", "--for=condition=Ready", "--timeout=60s"]);
        cluster.stop();
        let mut down = cluster.down_command();
        down.env_remove("NO_COLOR").env("TERM", "xterm").stdin(Stdio::null()).stdout(Stdio::null());
        let shown = success_on_a_terminal(down);
        let lines = lines(&shown);
        for line in ["stopping the node", "removing pods: 1 of 2", "removing pods: 2 of 2"] {
            assert!(lines.contains(&line), "{line}: {shown:?}");
        }
    });
}
