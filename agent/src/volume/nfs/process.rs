//! The process that mounts an NFS export. A server that does not answer blocks mount(2): a process can be killed then,
//! a thread cannot.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use rustix::process::{Signal, set_parent_process_death_signal};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;

use super::Arguments;

/// The first argument of the process.
pub const COMMAND: &str = "nfs-mount";

/// The command of the process: this program, with the arguments that [`main`] reads.
pub(super) fn command(arguments: &Arguments, at: &Path) -> Command {
    let mut command = Command::new("/proc/self/exe");
    let flags = arguments.flags.bits().to_string();
    command.arg0(std::env::args_os().next().unwrap_or_default()).arg(COMMAND);
    command.arg(std::process::id().to_string()).arg(&arguments.source).arg(at).arg(flags);
    command.args(&arguments.options).env_clear().current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    coracle_open_files::restore_limit(command.as_std_mut());
    command
}

/// Waits for the end of the process. `None` after the limit, or if the receiver of the result is gone.
pub(super) async fn wait<T>(
    child: &mut Child,
    limit: Duration,
    result: &mut oneshot::Sender<T>,
) -> Option<std::io::Result<ExitStatus>> {
    // Cancel-safe: the process can be waited for again.
    tokio::select! {
        ended = tokio::time::timeout(limit, child.wait()) => ended.ok(),
        () = result.closed() => None,
    }
}

/// The error of a process that has ended.
pub(super) fn outcome(ended: std::io::Result<ExitStatus>) -> Result<(), String> {
    match ended.map_err(|error| error.to_string())?.code() {
        Some(0) => Ok(()),
        Some(code) => Err(Errno::from_raw(code).desc().to_owned()),
        None => Err("the mount was interrupted".to_owned()),
    }
}

/// Mounts in the process of [`command`]. The exit status is the error number of mount(2).
///
/// `words` are the process id of the node, the export, the mount point, the flags, and the options for each version to
/// try.
pub fn main(words: impl Iterator<Item = OsString>) -> ExitCode {
    let words: Vec<OsString> = words.collect();
    let [node, source, at, flags, options @ ..] = words.as_slice() else { return code(Errno::EINVAL) };
    let (Some(node), Some(flags)) = (number::<u32>(node), number(flags)) else { return code(Errno::EINVAL) };
    // The node mounts again at its next start, so this process must not outlive the node. The kernel also sends the
    // signal if only the thread that started this process ends. Such an end is rare, and the pod's next attempt mounts
    // again.
    let ends_with_node = set_parent_process_death_signal(Some(Signal::KILL)).is_ok();
    if !ends_with_node || std::os::unix::process::parent_id() != node {
        return code(Errno::ECANCELED);
    }
    match attempt(source, Path::new(at), MsFlags::from_bits_retain(flags), options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(errno) => code(errno),
    }
}

fn attempt(source: &OsStr, at: &Path, flags: MsFlags, options: &[OsString]) -> Result<(), Errno> {
    let mut last = Err(Errno::EPROTONOSUPPORT);
    for options in options {
        last = mount(Some(source), at, Some("nfs4"), flags, Some(options.as_os_str()));
        if !matches!(last, Err(Errno::EPROTONOSUPPORT | Errno::EINVAL)) {
            break;
        }
    }
    last
}

fn number<T: std::str::FromStr>(word: &OsStr) -> Option<T> {
    word.to_str()?.parse().ok()
}

/// The exit status for an error. Errors of NFS that are not error numbers are above 255.
fn code(errno: Errno) -> ExitCode {
    let known = u8::try_from(errno as i32).unwrap_or_default();
    ExitCode::from(if known == 0 { u8::MAX } else { known })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test panics")]

    use super::*;

    fn run(program: &str, argument: &str) -> Child {
        Command::new(program).arg(argument).spawn().unwrap()
    }

    #[tokio::test]
    async fn a_mount_that_does_not_end_is_killed() {
        let mut child = run("sleep", "1000");
        let (mut result, receiver) = oneshot::channel::<()>();
        assert!(wait(&mut child, Duration::from_millis(1), &mut result).await.is_none());
        drop(receiver);
        let long = Duration::from_secs(1000);
        assert!(wait(&mut child, long, &mut result).await.is_none(), "the pod is gone");
        child.kill().await.unwrap();
        assert!(child.id().is_none(), "no process is left");
    }

    #[tokio::test]
    async fn the_exit_status_is_the_error_of_the_mount() {
        let ended = async |command: &str| {
            let mut child = Command::new("sh").args(["-c", command]).spawn().unwrap();
            outcome(child.wait().await)
        };
        assert_eq!(ended("exit 0").await, Ok(()));
        assert_eq!(ended("exit 13").await, Err("Permission denied".to_owned()));
        assert_eq!(ended("kill -9 $$").await, Err("the mount was interrupted".to_owned()));
    }

    #[test]
    fn the_command_has_the_words_that_the_process_reads() {
        let options = vec!["vers=4.2".to_owned(), "vers=4.1".to_owned()];
        let arguments = Arguments { source: "s:/".to_owned(), flags: MsFlags::MS_RDONLY, options };
        let command = command(&arguments, Path::new("/at"));
        let words: Vec<_> = command.as_std().get_args().map(|word| word.to_str().unwrap()).collect();
        let own = std::process::id().to_string();
        assert_eq!(words, [COMMAND, &own, "s:/", "/at", "1", "vers=4.2", "vers=4.1"]);
        let status = |words: &[&str]| main(words.iter().map(OsString::from));
        assert_eq!(status(&["1", "s:/"]), code(Errno::EINVAL));
    }
}
