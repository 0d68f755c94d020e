//! Files that the start of a container reads from its image. Each of them may be in any layer, so a search takes some
//! system calls for each layer. The layers of an image never change, so the results are kept for the next containers
//! of the image.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coracle_images::Image;

use crate::user::{Accounts, link_target};

/// Maximum number of images whose files are kept.
const IMAGES_MAX: usize = 16;
/// Maximum size in bytes of the account files of an image that are kept.
const ACCOUNTS_MAX: usize = 64 << 10;

/// The files of the images of the last containers.
#[derive(Debug, Default)]
pub(crate) struct ImageFiles {
    accounts: Recent<Arc<Accounts>>,
    run_links: Recent<Option<String>>,
}

/// Values by the id of an image, most recently used first.
#[derive(Debug)]
struct Recent<T>(Mutex<VecDeque<(String, T)>>);

// === impl ImageFiles ===

impl ImageFiles {
    /// The account files of an image.
    pub(crate) fn accounts(&self, image: &Image) -> Arc<Accounts> {
        self.accounts_of(&image.id, &image.layers)
    }

    /// Target of the link `/var/run` of an image. `None` if `/var/run` is not a link.
    pub(crate) fn run_link(&self, image: &Image) -> Option<String> {
        self.run_link_of(&image.id, &image.layers)
    }

    fn run_link_of(&self, id: &str, layers: &[PathBuf]) -> Option<String> {
        if let Some(known) = self.run_links.get(id) {
            return known;
        }
        // After an error the next container tries again.
        let found = link_target(layers, "var/run").ok()?;
        self.run_links.put(id, found.clone());
        found
    }

    fn accounts_of(&self, id: &str, layers: &[PathBuf]) -> Arc<Accounts> {
        if let Some(known) = self.accounts.get(id) {
            return known;
        }
        let found = Arc::new(Accounts::read(layers));
        // An empty file may be one that could not be read: the next container tries again.
        if !found.lacks_file() && found.size() <= ACCOUNTS_MAX {
            self.accounts.put(id, Arc::clone(&found));
        }
        found
    }
}

// === impl Recent ===

impl<T: Clone> Recent<T> {
    fn get(&self, id: &str) -> Option<T> {
        let mut kept = self.kept();
        let at = kept.iter().position(|(known, _)| known == id)?;
        let entry = kept.remove(at)?;
        let value = entry.1.clone();
        kept.push_front(entry);
        Some(value)
    }

    fn put(&self, id: &str, value: T) {
        let mut kept = self.kept();
        kept.retain(|(known, _)| known != id);
        kept.push_front((id.to_owned(), value));
        kept.truncate(IMAGES_MAX);
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<(String, T)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A layer with two account files. Both contain `alice`.
    fn layer(dir: &Path, uid: u32) -> Vec<PathBuf> {
        std::fs::create_dir_all(dir.join("etc")).expect("directory");
        std::fs::write(dir.join("etc/passwd"), format!("alice:x:{uid}:{uid}::/:\n")).expect("file");
        std::fs::write(dir.join("etc/group"), format!("alice:x:{uid}:\n")).expect("file");
        vec![dir.to_owned()]
    }

    fn uid(accounts: &Accounts) -> Result<u32, String> {
        accounts.resolve(None, "alice").map(|user| user.uid)
    }

    #[test]
    fn account_files_of_an_image_are_read_once() {
        let dir = tempfile::tempdir().expect("directory");
        let (files, one) = (ImageFiles::default(), layer(&dir.path().join("one"), 1));
        assert_eq!(uid(&files.accounts_of("one", &one)), Ok(1));
        std::fs::remove_dir_all(dir.path().join("one")).expect("removed");
        assert_eq!(uid(&files.accounts_of("one", &one)), Ok(1));
        let two = layer(&dir.path().join("two"), 2);
        assert_eq!(uid(&files.accounts_of("two", &two)), Ok(2), "another image has its own accounts");
    }

    #[test]
    fn account_files_that_are_absent_or_large_are_not_kept() {
        let dir = tempfile::tempdir().expect("directory");
        let files = ImageFiles::default();
        let layers = layer(dir.path(), 1);
        std::fs::remove_file(dir.path().join("etc/group")).expect("removed");
        assert_eq!(uid(&files.accounts_of("image", &layers)), Ok(1));
        layer(dir.path(), 2);
        assert_eq!(uid(&files.accounts_of("image", &layers)), Ok(2), "read again");
        let long = format!("alice:x:3:3::/:\n{}", "#".repeat(ACCOUNTS_MAX));
        std::fs::write(dir.path().join("etc/passwd"), long).expect("file");
        assert_eq!(uid(&files.accounts_of("large", &layers)), Ok(3));
        layer(dir.path(), 4);
        assert_eq!(uid(&files.accounts_of("large", &layers)), Ok(4), "read again");
    }

    #[test]
    fn a_link_that_could_not_be_read_is_searched_again() {
        let dir = tempfile::tempdir().expect("directory");
        let files = ImageFiles::default();
        let unreadable = [dir.path().join("x".repeat(1000))];
        assert_eq!(files.run_link_of("image", &unreadable), None);
        std::fs::create_dir(dir.path().join("var")).expect("directory");
        std::os::unix::fs::symlink("/run", dir.path().join("var/run")).expect("link");
        for _ in 0..2 {
            assert_eq!(files.run_link_of("image", &[dir.path().to_owned()]).as_deref(), Some("/run"));
            std::fs::remove_file(dir.path().join("var/run")).unwrap_or_default();
        }
    }

    #[test]
    fn the_files_of_a_limited_number_of_images_are_kept() {
        let recent = Recent::default();
        for number in 0..=IMAGES_MAX {
            recent.put(&number.to_string(), number);
            assert_eq!(recent.get("1").is_some(), number >= 1);
        }
        assert_eq!((recent.get("0"), recent.get("1"), recent.get("2")), (None, Some(1), Some(2)));
        recent.put("new", 99);
        assert_eq!(recent.get("3"), None, "the least recently used");
        assert_eq!(recent.kept().len(), IMAGES_MAX);
    }
}
