//! A user's home directory, from the container's own /etc/passwd.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;

/// Maximum bytes of /etc/passwd that are read. The file comes from the image and is untrusted.
const MAX_PASSWD: u64 = 1 << 20;

/// The home directory of a user. `/` if the file has no entry for the user.
pub(super) fn of(uid: u32) -> String {
    let found = open("/etc/passwd").and_then(|file| {
        let lines = BufReader::new(file.take(MAX_PASSWD)).lines().map_while(Result::ok);
        lines.filter_map(|line| parse_home(&line, uid)).next()
    });
    found.unwrap_or_else(|| "/".to_owned())
}

/// Opens a regular file. A container may have put a FIFO at this path, which would block, or a link to a pipe of the
/// shim. The caller already has only the container's rights.
fn open(path: &str) -> Option<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = File::options().read(true).custom_flags(flags).open(path).ok()?;
    file.metadata().is_ok_and(|found| found.is_file()).then_some(file)
}

/// Fuzz target for an account file of an image: a home directory is an absolute path in one line.
#[cfg(any(test, feature = "fuzzing"))]
pub fn fuzz(data: &[u8]) {
    for line in data.lines().map_while(Result::ok) {
        for uid in [0, 1000, u32::MAX] {
            let home = parse_home(&line, uid);
            assert!(home.is_none_or(|home| home.starts_with('/') && !home.contains([':', '\n'])));
        }
    }
}

fn parse_home(line: &str, uid: u32) -> Option<String> {
    let mut fields = line.split(':').skip(2);
    let id: u32 = fields.next()?.parse().ok()?;
    let home = fields.nth(2)?;
    (id == uid && home.starts_with('/')).then(|| home.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_is_replayed() {
        coracle_testing::replay_corpus("passwd", fuzz);
    }

    #[test]
    fn a_fifo_a_device_and_a_directory_are_not_read_as_passwd() {
        let dir = std::env::temp_dir().join(format!("coracle-home-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let fifo = dir.join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [fifo.to_str().unwrap(), "/dev/zero", "/dev"] {
            assert!(open(path).is_none(), "{path}");
        }
        assert!(open("/etc/passwd").is_some());
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_home_is_the_sixth_field_of_the_users_line() {
        assert_eq!(parse_home("www:x:33:33:www:/var/www:/bin/sh", 33).as_deref(), Some("/var/www"));
        assert_eq!(parse_home("www:x:33:33:www:/var/www:/bin/sh", 0), None);
        assert_eq!(parse_home("broken", 0), None);
    }
}
