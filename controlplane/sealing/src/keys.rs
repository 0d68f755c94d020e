//! Keys in memory: sealing and opening values.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use ring::{
    aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    rand::{SecureRandom, SystemRandom},
};

use crate::{Error, file};

/// Start of every sealed value; the key's id and a colon follow.
const PREFIX: &[u8] = b"k8s:enc:aesgcm:v1:";

/// The keys of a key file. The first key encrypts. All keys decrypt.
pub struct Keys {
    path: PathBuf,
    keys: Vec<Key>,
    random: SystemRandom,
}

struct Key {
    id: String,
    cipher: LessSafeKey,
}

/// Whether the bytes have the prefix of a sealed value.
#[must_use]
pub fn is_sealed(bytes: &[u8]) -> bool {
    bytes.starts_with(PREFIX)
}

impl fmt::Debug for Keys {
    /// Prints only the ids of the keys.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids: Vec<_> = self.keys.iter().map(|key| key.id.as_str()).collect();
        formatter.debug_struct("Keys").field("path", &self.path).field("ids", &ids).finish()
    }
}

impl Keys {
    /// Reads the key file. Creates it, with mode 0600 and one random key, if the file does not exist.
    ///
    /// # Errors
    /// The file cannot be created or read, is accessible to other users, or has a line that is not a key.
    pub fn load_or_create(path: &Path) -> Result<Self, Error> {
        if let Some(lines) = file::read(path)? {
            return Self::of(path, lines);
        }
        file::create(path)?;
        Self::load(path)
    }

    /// Reads the key file.
    ///
    /// # Errors
    /// The file is missing, cannot be read, is accessible to other users, or has a line that is not a key.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let missing = || Error::Read { path: path.to_owned(), source: std::io::ErrorKind::NotFound.into() };
        Self::of(path, file::read(path)?.ok_or_else(missing)?)
    }

    fn of(path: &Path, lines: Vec<file::Line>) -> Result<Self, Error> {
        let key = |line: file::Line| {
            let cipher = UnboundKey::new(&AES_256_GCM, &line.key).map_err(|_unspecified| Error::Cipher)?;
            Ok(Key { id: line.id, cipher: LessSafeKey::new(cipher) })
        };
        let keys = lines.into_iter().map(key).collect::<Result<_, Error>>()?;
        Ok(Self { path: path.to_owned(), keys, random: SystemRandom::new() })
    }

    /// Encrypts `plain` with the first key. Only [`Keys::open`] with the same `context` decrypts the result.
    ///
    /// # Errors
    /// The kernel has no random numbers, or `plain` is larger than the cipher's limit (64 GiB).
    pub fn seal(&self, plain: &[u8], context: &[u8]) -> Result<Vec<u8>, Error> {
        let key = self.keys.first().ok_or(Error::Cipher)?;
        let mut nonce = [0; NONCE_LEN];
        self.random.fill(&mut nonce).map_err(|_unspecified| Error::Cipher)?;
        let head = PREFIX.len() + key.id.len() + 1 + NONCE_LEN;
        let mut sealed = Vec::with_capacity(head + plain.len() + AES_256_GCM.tag_len());
        sealed.extend_from_slice(PREFIX);
        sealed.extend_from_slice(key.id.as_bytes());
        sealed.push(b':');
        sealed.extend_from_slice(&nonce);
        sealed.extend_from_slice(plain);
        let text = sealed.get_mut(head..).ok_or(Error::Cipher)?;
        let tag = key
            .cipher
            .seal_in_place_separate_tag(Nonce::assume_unique_for_key(nonce), Aad::from(context), text)
            .map_err(|_unspecified| Error::Cipher)?;
        sealed.extend_from_slice(tag.as_ref());
        Ok(sealed)
    }

    /// Decrypts a sealed value. `context` must be the same as in the call of [`Keys::seal`].
    ///
    /// # Errors
    /// The value is not sealed, its key is not in the file, or the value or its context was changed.
    pub fn open(&self, sealed: &[u8], context: &[u8]) -> Result<Vec<u8>, Error> {
        let (id, rest) = split_id(sealed).ok_or(Error::NotSealed)?;
        let unknown =
            || Error::UnknownKey { id: String::from_utf8_lossy(id).into_owned(), path: self.path.clone() };
        let key = self.keys.iter().find(|key| key.id.as_bytes() == id).ok_or_else(unknown)?;
        let damaged = || Error::Damaged { id: key.id.clone() };
        let (nonce, text) = rest.split_first_chunk::<NONCE_LEN>().ok_or_else(damaged)?;
        let mut plain = text.to_vec();
        let size = key
            .cipher
            .open_in_place(Nonce::assume_unique_for_key(*nonce), Aad::from(context), &mut plain)
            .map_err(|_unspecified| damaged())?
            .len();
        plain.truncate(size);
        Ok(plain)
    }

    /// Whether the value is sealed with the first key. A key rotation seals all other values again.
    #[must_use]
    pub fn is_current(&self, sealed: &[u8]) -> bool {
        let current = self.keys.first().map(|key| key.id.as_bytes());
        current.is_some() && split_id(sealed).map(|(id, _)| id) == current
    }
}

/// The key's id, and the bytes behind its colon.
fn split_id(sealed: &[u8]) -> Option<(&[u8], &[u8])> {
    let rest = sealed.strip_prefix(PREFIX)?;
    let colon = rest.iter().position(|byte| *byte == b':')?;
    Some((rest.get(..colon)?, rest.get(colon + 1..)?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test panics")]

    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    fn directory() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn a_created_key_file_is_private_and_can_be_loaded() {
        let directory = directory();
        let path = directory.path().join("key");
        let sealed = Keys::load_or_create(&path).unwrap().seal(b"value", b"name").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        let names: Vec<_> = fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["key"]);
        assert!(is_sealed(&sealed) && !sealed.windows(5).any(|bytes| bytes == b"value"));
        assert_eq!(Keys::load_or_create(&path).unwrap().open(&sealed, b"name").unwrap(), b"value");
    }

    #[test]
    fn an_incomplete_key_file_of_a_crash_is_replaced() {
        let directory = directory();
        let path = directory.path().join("key");
        fs::write(directory.path().join("key.new"), "half a li").unwrap();
        Keys::load_or_create(&path).unwrap();
        assert!(!directory.path().join("key.new").exists());
    }

    #[test]
    fn another_context_and_every_changed_byte_are_refused() {
        let directory = directory();
        let keys = Keys::load_or_create(&directory.path().join("key")).unwrap();
        let sealed = keys.seal(b"value", b"default/a").unwrap();
        assert!(matches!(keys.open(&sealed, b"default/b"), Err(Error::Damaged { .. })));
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(keys.open(&changed, b"default/a").is_err(), "byte {at}");
            assert!(keys.open(&sealed[..at], b"default/a").is_err(), "cut at {at}");
        }
        assert_ne!(sealed, keys.seal(b"value", b"default/a").unwrap(), "nonces repeat");
    }

    #[test]
    fn a_key_file_that_others_can_read_is_refused() {
        let directory = directory();
        let path = directory.path().join("key");
        Keys::load_or_create(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(Keys::load_or_create(&path), Err(Error::Exposed { mode: 0o640, .. })));
    }

    #[test]
    fn a_link_a_fifo_and_a_malformed_file_are_refused() {
        let directory = directory();
        let path = directory.path().join("key");
        Keys::load_or_create(&path).unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(matches!(Keys::load_or_create(&link), Err(Error::Read { .. })));
        let write = |text: &str| {
            let path = directory.path().join("other");
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            Keys::load_or_create(&path).err().unwrap()
        };
        assert!(matches!(write("# nothing\n"), Error::Empty { .. }));
        assert!(matches!(write("a c2hvcnQ=\n"), Error::Malformed { line: 1, .. }));
        assert!(matches!(write("no-key\n"), Error::Malformed { line: 1, .. }));
        let key = fs::read_to_string(&path).unwrap();
        assert!(matches!(write(&format!("{key}\n{key}")), Error::Malformed { line: 3, .. }));
    }

    #[test]
    fn a_second_key_takes_over_and_the_first_one_still_opens() {
        let directory = directory();
        let path = directory.path().join("key");
        let first = Keys::load_or_create(&path).unwrap();
        let sealed = first.seal(b"value", b"name").unwrap();
        let line = fs::read_to_string(&path).unwrap();
        let other = directory.path().join("other");
        Keys::load_or_create(&other).unwrap();
        fs::write(&path, fs::read_to_string(&other).unwrap() + &line).unwrap();
        let both = Keys::load(&path).unwrap();
        assert!(first.is_current(&sealed) && !both.is_current(&sealed));
        assert_eq!(both.open(&sealed, b"name").unwrap(), b"value");
        let again = both.seal(b"value", b"name").unwrap();
        assert!(both.is_current(&again));
        assert!(matches!(first.open(&again, b"name"), Err(Error::UnknownKey { .. })));
        assert!(matches!(first.open(b"{}", b"name"), Err(Error::NotSealed)));
    }
}
