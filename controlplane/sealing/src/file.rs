//! The key file: one key per line, `ID BASE64`, with 32 bytes of key; `#` starts a comment.

use std::{
    fs::{File, OpenOptions, Permissions},
    io::{self, ErrorKind, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use nix::fcntl::OFlag;
use ring::rand::{SecureRandom, SystemRandom};

use crate::{Error, private_file};

/// Bytes of an AES-256 key.
pub(crate) const KEY_SIZE: usize = 32;
/// Maximum size of a key file in bytes.
const MAX_FILE: u64 = 64 << 10;
/// Maximum length of a key's id.
const MAX_ID: usize = 64;

/// A key and its id, in the form of the file.
pub(crate) struct Line {
    pub(crate) id: String,
    pub(crate) key: [u8; KEY_SIZE],
}

/// Reads the key file. `None` if the file does not exist.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<Line>>, Error> {
    match private_file::read(path, OFlag::O_NOFOLLOW, MAX_FILE) {
        Err(Error::Read { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
        Ok(text) => parse(path, &text).map(Some),
    }
}

/// Creates the key file with one random key. If another process creates the file at the same time, the file of that
/// process stays.
///
/// The key is synced to disk before the file gets its final name. So a power cut leaves the whole file or no file.
pub(crate) fn create(path: &Path) -> Result<(), Error> {
    let failed = |source| Error::Create { path: path.to_owned(), source };
    let line = random_line()?;
    write_new(path, line.as_bytes()).map_err(failed)
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let temporary = with_suffix(path, ".new");
    let flags = OFlag::O_NOFOLLOW.bits();
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(flags)
        .open(&temporary)?;
    // Only the process with the lock writes, and only if the final name is free. Otherwise another process has linked
    // this file under the final name.
    file.lock()?;
    if path.symlink_metadata().is_ok() {
        return Ok(());
    }
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.set_len(0)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    match std::fs::hard_link(&temporary, path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        other => other?,
    }
    std::fs::remove_file(&temporary)?;
    File::open(directory)?.sync_all()
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn random_line() -> Result<String, Error> {
    let (mut key, mut id) = ([0; KEY_SIZE], [0; 8]);
    let random = SystemRandom::new();
    random.fill(&mut key).map_err(|_unspecified| Error::Cipher)?;
    random.fill(&mut id).map_err(|_unspecified| Error::Cipher)?;
    let id = u64::from_be_bytes(id);
    Ok(format!("{id:016x} {}\n", STANDARD.encode(key)))
}

fn parse(path: &Path, text: &str) -> Result<Vec<Line>, Error> {
    let mut lines: Vec<Line> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let malformed = |detail| Error::Malformed { path: path.to_owned(), line: index + 1, detail };
        let parsed = parse_line(line).map_err(malformed)?;
        if lines.iter().any(|earlier| earlier.id == parsed.id) {
            return Err(malformed("its id is that of an earlier line"));
        }
        lines.push(parsed);
    }
    if lines.is_empty() {
        return Err(Error::Empty { path: path.to_owned() });
    }
    Ok(lines)
}

fn parse_line(line: &str) -> Result<Line, &'static str> {
    let (id, key) =
        line.split_once(char::is_whitespace).ok_or("it must be an id, a space and a key in base64")?;
    let valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if id.len() > MAX_ID || !id.chars().all(valid) {
        return Err("an id has at most 64 letters, digits and -_.");
    }
    let key = STANDARD.decode(key.trim()).map_err(|_error| "its key is not base64")?;
    let key = key.try_into().map_err(|_wrong_size| "its key must have 32 bytes")?;
    Ok(Line { id: id.to_owned(), key })
}
