//! The default AppArmor profile: its rules, and how it is loaded into the kernel.
//!
//! The rules follow the default profiles of other runtimes, so that their workloads run here. A container may do everything
//! except mount, write to kernel files, and interact with processes of other profiles.

use std::io;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use coracle_cni::ProcessGroup;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::confinement::{Modules, OWN_PROFILE};

/// Programs that compile and load profiles.
const PARSERS: [&str; 2] = ["/sbin/apparmor_parser", "/usr/sbin/apparmor_parser"];
/// Maximum time of a load. The parser takes less than a second.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Back-off after a load that timed out. During the back-off, containers that need the profile are refused at once.
const TIMEOUT_BACKOFF: Duration = Duration::from_secs(60);
/// Bytes of the parser's standard error that are kept.
const MESSAGES_MAX: u64 = 4 << 10;
/// Directory of the parser's include files.
const INCLUDE_DIR: &str = "/etc/apparmor.d";

/// The include files that exist.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct IncludeFiles {
    abi: bool,
    tunables: bool,
    base: bool,
}

/// The default profile of this machine. A process loads the profile at its first use. If an earlier process has loaded
/// the profile, the process replaces it at its start.
#[derive(Debug, Default)]
pub(crate) struct DefaultProfile {
    /// Held during a load.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Whether a missing parser was logged.
    warned: bool,
    /// Whether this process has loaded the profile.
    is_current: bool,
    /// End of the last load, if it timed out.
    timed_out_at: Option<Instant>,
}

// === impl IncludeFiles ===

impl IncludeFiles {
    fn detect() -> Self {
        let exists = |name: &str| Path::new(INCLUDE_DIR).join(name).exists();
        Self {
            abi: exists("abi/3.0"),
            tunables: exists("tunables/global"),
            base: exists("abstractions/base"),
        }
    }
}

// === impl DefaultProfile ===

impl DefaultProfile {
    /// Loads the profile if the kernel has AppArmor and this process has not loaded it. Without a parser this logs a warning
    /// once, and containers get the profile that [`super::confinement`] chooses.
    ///
    /// # Errors
    /// If the parser fails, or does not end in time, and the kernel has no such profile.
    pub(crate) async fn ensure(&self) -> io::Result<()> {
        let mut state = self.state.lock().await;
        let Some(is_loaded) = is_loaded() else { return Ok(()) };
        let Some(parser) = parser() else {
            if !state.warned {
                warn!(
                    profile = OWN_PROFILE,
                    "cannot load the default AppArmor profile: apparmor_parser is missing"
                );
            }
            state.warned = true;
            return Ok(());
        };
        state.ensure(parser, &profile(IncludeFiles::detect(), &own_label()), is_loaded).await
    }

    /// Replaces the profile of an earlier process, which may be of an earlier build. The kernel applies the new rules also to
    /// running containers.
    pub(crate) async fn replace_earlier(&self) {
        if is_loaded() != Some(true) {
            return;
        }
        if let Err(error) = self.ensure().await {
            warn!(profile = OWN_PROFILE, %error, "cannot load the default AppArmor profile");
        }
    }
}

// === impl State ===

impl State {
    /// Loads the profile, unless this process has loaded it and the kernel still has it. If the kernel has the profile of an
    /// earlier process, a failure is only logged: that profile stays in force.
    async fn ensure(&mut self, parser: &str, text: &str, is_loaded: bool) -> io::Result<()> {
        if is_loaded && self.is_current {
            return Ok(());
        }
        match self.load(parser, text, TIMEOUT).await {
            Ok(()) => {
                self.is_current = true;
                info!(profile = OWN_PROFILE, "loaded the default AppArmor profile");
                Ok(())
            }
            Err(error) if is_loaded => {
                warn!(
                    profile = OWN_PROFILE,
                    %error,
                    "cannot replace the default AppArmor profile; the profile of an earlier process stays in force"
                );
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Runs the parser, unless its last run timed out within [`TIMEOUT_BACKOFF`].
    async fn load(&mut self, parser: &str, text: &str, limit: Duration) -> io::Result<()> {
        if self.timed_out_at.is_some_and(|end| end.elapsed() < TIMEOUT_BACKOFF) {
            let why = format!(
                "{parser} did not end in time; the next attempt is made in at most {TIMEOUT_BACKOFF:?}"
            );
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        let loaded = load(parser, text, limit).await;
        let timed_out = loaded.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::TimedOut);
        self.timed_out_at = timed_out.then(Instant::now);
        loaded
    }
}

/// The state of AppArmor, for the runtime's status.
pub(crate) fn describe() -> &'static str {
    match is_loaded() {
        None => "off",
        Some(true) => "on, coracle-default is loaded",
        Some(false) if parser().is_some() => "on, coracle-default is loaded when it is needed",
        Some(false) => "on, but coracle-default cannot be loaded: apparmor_parser is missing",
    }
}

/// Whether the profile is loaded. `None` if the kernel has no AppArmor.
fn is_loaded() -> Option<bool> {
    let loaded = Modules::detect().apparmor?;
    Some(loaded.iter().any(|name| name == OWN_PROFILE))
}

fn parser() -> Option<&'static str> {
    PARSERS.into_iter().find(|path| Path::new(path).exists())
}

/// Loads a profile. The parser is killed after the limit, and when the caller is cancelled.
async fn load(parser: &str, text: &str, limit: Duration) -> io::Result<()> {
    let mut command = Command::new(parser);
    // The parser reads the profile from standard input. The parser's cache is skipped, because it detects changes only by
    // the modification time of a file.
    command.args(["--replace", "--skip-cache"]).env_clear().current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.process_group(0).kill_on_drop(true);
    coracle_open_files::restore_limit(command.as_std_mut());
    let mut child = command.spawn()?;
    // The group is dropped before the child, see `ProcessGroup`.
    let group = ProcessGroup::of(&child);
    let Ok(ended) = timeout(limit, exchange(&mut child, text)).await else {
        let why = format!("{parser} did not end within {limit:?} and was killed");
        return Err(io::Error::new(io::ErrorKind::TimedOut, why));
    };
    let (status, messages) = ended?;
    group.ended();
    if status.success() {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&messages).trim().replace('\n', "; ");
    Err(io::Error::other(format!("{parser} ended with {status}: {errors}")))
}

/// Writes the profile, and returns the first messages and the exit status.
async fn exchange(child: &mut Child, text: &str) -> io::Result<(ExitStatus, Vec<u8>)> {
    let (stdin, stderr) = (child.stdin.take(), child.stderr.take());
    let write = async {
        if let Some(mut stdin) = stdin {
            // A parser that fails early does not read the profile. Its messages have the cause.
            let _unread = stdin.write_all(text.as_bytes()).await;
        }
    };
    let read = async {
        let mut messages = Vec::new();
        if let Some(mut stderr) = stderr {
            (&mut stderr).take(MESSAGES_MAX).read_to_end(&mut messages).await?;
            // The rest is read and discarded: a closed pipe would kill the parser.
            tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await?;
        }
        Ok::<_, io::Error>(messages)
    };
    let ((), messages) = tokio::join!(write, read);
    let messages = messages?;
    Ok((child.wait().await?, messages))
}

/// The AppArmor profile of this process.
fn own_label() -> String {
    let label = std::fs::read_to_string("/proc/self/attr/current").unwrap_or_default();
    let name = label.trim().split(" (").next().unwrap_or_default();
    if name.is_empty() { "unconfined".to_owned() } else { name.to_owned() }
}

/// The profile's text. Signals from `runtime`, the label of this process, are allowed.
fn profile(includes: IncludeFiles, runtime: &str) -> String {
    let abi = if includes.abi { "abi <abi/3.0>,\n" } else { "" };
    let tunables = if includes.tunables { "include <tunables/global>\n" } else { "@{PROC}=/proc/\n" };
    let base = if includes.base { "  include <abstractions/base>\n" } else { "" };
    let peers: String = if runtime == "unconfined" {
        String::new()
    } else {
        format!("  signal (receive) peer=\"{runtime}\",\n")
    };
    format!(
        "{abi}{tunables}
profile {OWN_PROFILE} flags=(attach_disconnected,mediate_deleted) {{
{base}
  network,
    # The seccomp profile cannot refuse sockets of the kernel's crypto API to programs that use socketcall(2).
  deny network alg,
  capability,
  file,
  umount,
  deny mount,

    # The processes that stop containers, and the container's own processes.
  signal (receive) peer=unconfined,
{peers}  signal (send,receive) peer={OWN_PROFILE},
  ptrace (trace,tracedby,read,readby) peer={OWN_PROFILE},
{RULES}}}
"
    )
}

/// Kernel files that containers are not permitted to write.
const RULES: &str = "
    # /proc: all except the directories of processes and the limits of shared memory.
  deny @{PROC}/* w,
  deny @{PROC}/[^0-9s/]*/** w,
  deny @{PROC}/s[^ey/]*/** w,
  deny @{PROC}/sy[^s/]*/** w,
  deny @{PROC}/sys[^/]*/** w,
  deny @{PROC}/sys/[^k/]** w,
  deny @{PROC}/sys/kernel/[^s/]** w,
  deny @{PROC}/sys/kernel/s[^h/]** w,
  deny @{PROC}/sys/kernel/sh[^m/]** w,
  deny @{PROC}/sysrq-trigger rwklx,
  deny @{PROC}/kcore rwklx,

    # /sys: all except cgroups.
  deny /sys/[^f/]*/** wklx,
  deny /sys/f[^s/]*/** wklx,
  deny /sys/fs/[^c/]*/** wklx,
  deny /sys/fs/c[^g/]*/** wklx,
  deny /sys/fs/cg[^r/]*/** wklx,
  deny /sys/firmware/** rwklx,
  deny /sys/devices/virtual/powercap/** rwklx,
  deny /sys/kernel/security/** rwklx,
";

#[cfg(test)]
mod tests {
    use super::*;

    /// A program in place of the parser. A separate process writes the program's file. If this process wrote it, a fork
    /// by another test could inherit the writable descriptor, and execve(2) would fail with ETXTBSY.
    fn program(dir: &Path, script: &str) -> String {
        let written = std::process::Command::new("sh")
            .args(["-c", r#"printf '#!/bin/sh\n%s\n' "$1" >parser && chmod 755 parser"#, "sh", script])
            .current_dir(dir)
            .status();
        assert!(written.expect("sh").success());
        dir.join("parser").to_string_lossy().into_owned()
    }

    #[tokio::test]
    async fn a_parser_that_does_not_end_is_killed_and_not_run_again_at_once() {
        let dir = tempfile::tempdir().expect("directory");
        let parser = program(dir.path(), "PATH=/usr/bin:/bin; sleep 1000 & wait");
        let mut state = State::default();
        let error = state.load(&parser, "", Duration::from_millis(10)).await.expect_err("late");
        assert!(error.to_string().contains("was killed"), "{error}");
        let parser = program(dir.path(), "exit 0");
        let error = state.load(&parser, "", Duration::from_secs(60)).await.expect_err("back-off");
        assert!(error.to_string().contains("next attempt"), "{error}");
        state.timed_out_at = Instant::now().checked_sub(TIMEOUT_BACKOFF);
        state.load(&parser, "", Duration::from_secs(60)).await.expect("the back-off has ended");
        assert!(state.timed_out_at.is_none());
    }

    /// An upgraded node kept the profile of the earlier build until the next boot.
    #[tokio::test]
    async fn the_profile_of_an_earlier_process_is_replaced_once() {
        let dir = tempfile::tempdir().expect("directory");
        let texts = dir.path().join("texts");
        let parser = program(dir.path(), &format!("PATH=/usr/bin:/bin; cat >>{}", texts.display()));
        let mut state = State::default();
        for _ in 0..2 {
            state.ensure(&parser, "new;", true).await.expect("loaded");
        }
        assert_eq!(std::fs::read_to_string(&texts).expect("texts"), "new;", "once by this process");
        state.ensure(&parser, "again;", false).await.expect("loaded");
        assert_eq!(
            std::fs::read_to_string(&texts).expect("texts"),
            "new;again;",
            "another program removed it"
        );
    }

    #[tokio::test]
    async fn an_earlier_profile_that_cannot_be_replaced_stays_in_force() {
        let dir = tempfile::tempdir().expect("directory");
        let parser = program(dir.path(), "exit 3");
        let mut state = State::default();
        state.ensure(&parser, "", true).await.expect("the earlier profile is used");
        assert!(!state.is_current, "the next container tries it again");
        assert!(state.ensure(&parser, "", false).await.is_err());
    }

    #[tokio::test]
    async fn a_parser_that_fails_early_is_reported_with_its_first_messages() {
        let dir = tempfile::tempdir().expect("directory");
        // The profile and the messages both exceed the capacity of a pipe.
        let script = "PATH=/usr/bin:/bin; echo wrong >&2; head -c 262144 /dev/zero | tr '\\0' x >&2; exit 3";
        let parser = program(dir.path(), script);
        let error = load(&parser, &"x".repeat(1 << 20), Duration::from_secs(60)).await.expect_err("failed");
        let text = error.to_string();
        assert!(text.contains("exit status: 3: wrong; x"), "{text}");
        assert!(text.len() < 2 * 4096, "{}", text.len());
    }

    #[test]
    fn a_profile_includes_the_existing_files() {
        let bare = profile(IncludeFiles::default(), "unconfined");
        assert!(bare.starts_with("@{PROC}=/proc/\n\nprofile coracle-default "), "{bare}");
        assert!(!bare.contains("include") && !bare.contains("abi <") && !bare.contains('"'));
        let whole = profile(IncludeFiles { abi: true, tunables: true, base: true }, "my runtime");
        assert!(whole.starts_with("abi <abi/3.0>,\ninclude <tunables/global>\n"));
        assert!(whole.contains("  include <abstractions/base>\n"));
        assert!(whole.contains("signal (receive) peer=\"my runtime\",\n"));
        for text in [bare, whole] {
            assert!(text.contains("\n  deny mount,\n") && text.ends_with("rwklx,\n}\n"));
            assert!(text.contains("\n  network,\n") && text.contains("\n  deny network alg,\n"), "{text}");
            assert!(!text.contains("vsock"), "containers without a seccomp profile may use such sockets");
        }
    }
}
