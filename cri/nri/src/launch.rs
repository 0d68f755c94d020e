//! Pre-installed plugins: every executable file named `<index>-<name>` in the plugin directory is started
//! with the runtime. The started plugin inherits its socket as descriptor 3.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use tokio::net::UnixStream;
use tokio::process::Command;
use tracing::warn;

use crate::plugin::{Candidate, Identity};
use crate::settings::Settings;

/// Number of the inherited descriptor.
const SOCKET: i32 = 3;

/// A plugin program.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    path: PathBuf,
    identity: Identity,
    config: String,
}

/// Starts all programs. A program that does not start is skipped with a warning.
pub(crate) fn launch_all(settings: &Settings) -> Vec<Candidate<UnixStream>> {
    let Some(dir) = &settings.plugins else { return Vec::new() };
    let mut started = Vec::new();
    for program in find(dir, &settings.configs) {
        match launch(&program) {
            Ok(candidate) => started.push(candidate),
            Err(error) => {
                warn!(plugin = %program.path.display(), %error, "cannot start NRI plugin");
            }
        }
    }
    started
}

fn find(dir: &Path, configs: &Path) -> Vec<Program> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            warn!(dir = %dir.display(), %error, "cannot list NRI plugins");
            return Vec::new();
        }
    };
    let mut programs: Vec<Program> =
        entries.flatten().filter_map(|entry| program(entry.path(), configs)).collect();
    programs.sort_by(|one, other| one.path.cmp(&other.path));
    programs
}

fn program(path: PathBuf, configs: &Path) -> Option<Program> {
    let metadata = std::fs::metadata(&path).ok()?;
    if metadata.is_dir() || metadata.permissions().mode() & 0o111 == 0 {
        return None;
    }
    let file = path.file_name()?.to_str()?;
    let (index, name) = file.split_once('-').unwrap_or((file, ""));
    match Identity::new(index, name) {
        Ok(identity) => {
            let config = config(&identity, configs)?;
            Some(Program { path, identity, config })
        }
        Err(error) => {
            warn!(plugin = %path.display(), %error, "ignoring NRI plugin: its file name must be <index>-<name>");
            None
        }
    }
}

/// Maximum bytes of a plugin's configuration. It is smaller than the maximum of a message.
const CONFIG_MAX: u64 = 1 << 20;

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(CONFIG_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > CONFIG_MAX {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("the configuration is larger than {CONFIG_MAX} bytes"),
        ));
    }
    Ok(text)
}

/// Reads `<index>-<name>.conf`, or `<name>.conf` if the first file does not exist. Empty if both files do not exist. A
/// plugin with an unreadable configuration is not started.
fn config(identity: &Identity, configs: &Path) -> Option<String> {
    for name in [identity.full(), identity.name.clone()] {
        let path = configs.join(format!("{name}.conf"));
        match read(&path) {
            Ok(text) => return Some(text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                warn!(path = %path.display(), %error, "cannot read the configuration of an NRI plugin");
                return None;
            }
        }
    }
    Some(String::new())
}

#[allow(unsafe_code, reason = "the child inherits a descriptor under a number of its own")]
fn launch(program: &Program) -> io::Result<Candidate<UnixStream>> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::Stream, None, flags)?;
    let mut command = Command::new(&program.path);
    command
        .env_clear()
        .env("NRI_PLUGIN_NAME", &program.identity.name)
        .env("NRI_PLUGIN_IDX", &program.identity.index)
        .env("NRI_PLUGIN_SOCKET", SOCKET.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let given = theirs.as_raw_fd();
    // SAFETY: between fork and exec only async-signal-safe system calls are made, without allocation; the
    // descriptor is open until after the spawn.
    unsafe {
        command.pre_exec(move || pass_socket(given));
    }
    coracle_open_files::restore_limit(command.as_std_mut());
    let child = command.spawn()?;
    drop(theirs);
    let ours = std::os::unix::net::UnixStream::from(ours);
    ours.set_nonblocking(true)?;
    Ok(Candidate {
        stream: UnixStream::from_std(ours)?,
        identity: Some(program.identity.clone()),
        config: program.config.clone(),
        child: Some(child),
    })
}

/// Makes the socket the descriptor that the plugin expects, without close-on-exec.
#[allow(unsafe_code, reason = "plain system calls")]
fn pass_socket(given: i32) -> io::Result<()> {
    let result = if given == SOCKET {
        // SAFETY: the call clears the flags of a descriptor, and touches no memory.
        unsafe { libc::fcntl(given, libc::F_SETFD, 0) }
    } else {
        // SAFETY: a descriptor that had this number belongs to the parent and is not needed after exec.
        unsafe { libc::dup2(given, SOCKET) }
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(path: &Path, mode: u32) {
        std::fs::write(path, "x").expect("write");
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("mode");
    }

    #[test]
    fn a_plugin_with_a_too_large_configuration_is_not_started() {
        let dir = tempfile::tempdir().expect("directory");
        let (plugins, configs) = (dir.path().join("plugins"), dir.path().join("conf.d"));
        std::fs::create_dir_all(&plugins).expect("directory");
        std::fs::create_dir_all(&configs).expect("directory");
        put(&plugins.join("10-a"), 0o755);
        let sized = |bytes: u64| {
            File::create(configs.join("a.conf")).and_then(|file| file.set_len(bytes)).expect("file");
            find(&plugins, &configs).len()
        };
        assert_eq!((sized(CONFIG_MAX), sized(CONFIG_MAX + 1), sized(1 << 40)), (1, 0, 0));
    }

    #[test]
    fn programs_are_found_in_order_with_their_configurations() {
        let dir = tempfile::tempdir().expect("directory");
        let (plugins, configs) = (dir.path().join("plugins"), dir.path().join("conf.d"));
        assert!(find(&plugins, &configs).is_empty());
        std::fs::create_dir_all(plugins.join("30-directory")).expect("directory");
        std::fs::create_dir_all(&configs).expect("directory");
        put(&plugins.join("20-b"), 0o755);
        put(&plugins.join("10-a"), 0o755);
        put(&plugins.join("40-not-executable"), 0o644);
        put(&plugins.join("nameless"), 0o755);
        std::fs::write(configs.join("a.conf"), "of a").expect("write");
        std::fs::write(configs.join("b.conf"), "of any b").expect("write");
        std::fs::write(configs.join("20-b.conf"), "of this b").expect("write");
        let found = find(&plugins, &configs);
        let found: Vec<_> = found.iter().map(|p| (p.identity.full(), p.config.as_str())).collect();
        assert_eq!(found, [("10-a".to_owned(), "of a"), ("20-b".to_owned(), "of this b")]);
    }
}
