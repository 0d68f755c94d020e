//! Finds and executes the program of a new process: its last step.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt as _;

use coracle_proto::shim::error::Kind;
use nix::errno::Errno;

/// Search path if the environment has no PATH, as in execvp(3).
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Executes the program. Returns only on failure, with the error.
pub(crate) fn become_program(args: &[String], env: &[CString]) -> (Kind, String) {
    let Some(name) = args.first().filter(|name| !name.is_empty()) else {
        return (Kind::CommandNotFound, "the command is empty".to_owned());
    };
    let Some(argv) = c_strings(args) else {
        return (Kind::Invalid, "the command contains a NUL byte".to_owned());
    };
    let mut worst = Errno::ENOENT;
    for path in candidates(name, path_of(env)) {
        let Ok(path) = CString::new(path) else { continue };
        let Err(errno) = nix::unistd::execve(&path, &argv, env);
        match errno {
            // Another directory of the search path may contain the program, as in a shell.
            Errno::ENOENT | Errno::ENOTDIR => {}
            Errno::EACCES => worst = errno,
            _ => {
                worst = errno;
                break;
            }
        }
    }
    refusal(name, worst)
}

fn refusal(name: &str, errno: Errno) -> (Kind, String) {
    let what = if name.contains('/') { "stat" } else { "search $PATH for" };
    match errno {
        Errno::ENOENT | Errno::ENOTDIR if name.contains('/') => {
            (Kind::CommandNotFound, format!("exec: \"{name}\": {what} {name}: no such file or directory"))
        }
        Errno::ENOENT | Errno::ENOTDIR => {
            (Kind::CommandNotFound, format!("exec: \"{name}\": executable file not found in $PATH"))
        }
        Errno::EACCES => (Kind::CommandNotExecutable, format!("exec: \"{name}\": permission denied")),
        Errno::ENOEXEC => (Kind::CommandNotExecutable, format!("exec \"{name}\": exec format error")),
        errno => (Kind::CommandNotExecutable, format!("exec \"{name}\": {}", errno.desc())),
    }
}

fn path_of(env: &[CString]) -> String {
    let path = env.iter().find_map(|entry| entry.to_bytes().strip_prefix(b"PATH="));
    path.map_or_else(
        || DEFAULT_PATH.to_owned(),
        |path| OsStr::from_bytes(path).to_string_lossy().into_owned(),
    )
}

fn candidates(name: &str, path: String) -> Vec<String> {
    if name.contains('/') {
        return vec![name.to_owned()];
    }
    // An empty entry, which would mean the working directory, is ignored: an image could run an unintended program
    // from there.
    path.split(':').filter(|dir| !dir.is_empty()).map(|dir| format!("{dir}/{name}")).collect()
}

/// Converts strings for execve. `None` if a string contains a NUL.
pub(crate) fn c_strings(strings: &[String]) -> Option<Vec<CString>> {
    strings.iter().map(|text| CString::new(text.as_bytes()).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_slash_is_not_searched_for() {
        assert_eq!(candidates("./x", "/bin:/usr/bin".into()), ["./x"]);
        assert_eq!(candidates("x", "/bin::/usr/bin".into()), ["/bin/x", "/usr/bin/x"]);
    }

    #[test]
    fn absent_and_forbidden_programs_are_distinguished() {
        assert_eq!(become_program(&["/no/such/file".into()], &[]).0, Kind::CommandNotFound);
        assert_eq!(become_program(&["no-such-name".into()], &[]).0, Kind::CommandNotFound);
        assert_eq!(become_program(&["/etc/passwd".into()], &[]).0, Kind::CommandNotExecutable);
        assert_eq!(become_program(&["/etc".into()], &[]).0, Kind::CommandNotExecutable);
    }
}
