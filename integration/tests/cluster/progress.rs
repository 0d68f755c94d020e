//! The progress of long commands is shown on terminals only.

use std::fs::OpenOptions;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::{Command, Stdio};

use coracle_integration::{Machine, on_a_machine};
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

/// Runs the command with a terminal as its standard error. Returns what the terminal received.
fn on_a_terminal(mut command: Command) -> String {
    let mut master = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname_r(&master).unwrap();
    let terminal = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(name).unwrap();
    let status = command.stderr(terminal).status().unwrap();
    assert!(!status.success());
    // The command has the last descriptors of the terminal. Without them a read fails with EIO after the last byte.
    drop(command);
    let mut received = Vec::new();
    let _ended = master.read_to_end(&mut received);
    String::from_utf8(received).unwrap()
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
