//! Reads the files that a container's environment comes from.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use coracle_cri::blocking::{self, Abandoned, Blocked};
use k8s_openapi::api::core::v1::Container;

use super::Job;
use crate::pod::env::{BYTES_MAX, EnvFile, FILE_MAX, FileName, FileProblem, wanted_keys};
use crate::volume;

/// A file, and the keys whose values are read from the file.
struct RequestedFile {
    /// Path of the volume on the host.
    volume: PathBuf,
    name: FileName,
    keys: BTreeSet<String>,
}

impl Job {
    /// Reads the files that the container's environment refers to, in `emptyDir` volumes of the pod only. A privileged
    /// container can mount a file system that never responds there, so the files are read outside of the async workers.
    pub(super) async fn env_files(
        &self,
        container: &Container,
    ) -> Result<BTreeMap<FileName, EnvFile>, Blocked> {
        let named = wanted_keys(container).into_iter();
        let found = named.filter_map(|(name, keys)| {
            Some(RequestedFile { volume: self.empty_dir_named(&name.volume)?, name, keys })
        });
        let files: Vec<RequestedFile> = found.collect();
        if files.is_empty() {
            return Ok(BTreeMap::new());
        }
        let place = self.node.volumes.pod_dir(&self.uid).join("env-files").join(&container.name);
        blocking::run(&place, move |abandoned| read_all(files, abandoned)).await
    }

    /// Path of the pod's `emptyDir` with this name on the host.
    fn empty_dir_named(&self, name: &str) -> Option<PathBuf> {
        let mut volumes = self.pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let is_empty_dir = volumes.any(|volume| volume.name == name && volume.empty_dir.is_some());
        self.volumes.as_ref().filter(|_| is_empty_dir)?.host_path(name).map(Path::to_owned)
    }
}

/// Reads files until their total size reaches the maximum size of an environment.
fn read_all(files: Vec<RequestedFile>, abandoned: &Abandoned) -> BTreeMap<FileName, EnvFile> {
    let mut left = BYTES_MAX as u64;
    let mut found = BTreeMap::new();
    for RequestedFile { volume, name, keys } in files {
        if abandoned.is_set() {
            break;
        }
        // As upstream, a path with a slash at its start is below the volume, too.
        let path = name.path.trim_start_matches('/');
        let read = match left {
            0 => Err(format!("the files of a container are larger than {BYTES_MAX} bytes")),
            _ => volume::file::read(&volume, path, FILE_MAX).map_err(|error| error.to_string()),
        };
        let taken = match &read {
            Ok(content) => content.as_ref().map_or(0, |content| content.len() as u64),
            // A file that cannot be read counts with the maximum size, because it may be too large.
            Err(_) => FILE_MAX,
        };
        left = left.saturating_sub(taken);
        let file = match read {
            Ok(Some(content)) => EnvFile::parse(&content, &keys),
            Ok(None) => FileProblem::Missing.into(),
            Err(problem) => FileProblem::Unreadable(problem).into(),
        };
        found.insert(name, file);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: String) -> FileName {
        FileName { volume: "v".to_owned(), path }
    }

    /// The result of reading the key `K` of these files.
    fn read(volume: &Path, paths: impl Iterator<Item = String>) -> BTreeMap<FileName, EnvFile> {
        let wanted = |path| RequestedFile {
            volume: volume.to_owned(),
            name: file(path),
            keys: ["K".to_owned()].into(),
        };
        read_all(paths.map(wanted).collect(), &Abandoned::default())
    }

    #[test]
    fn a_path_with_a_slash_is_below_the_volume_and_a_missing_file_is_reported_as_missing() {
        let dir = tempfile::tempdir().expect("directory");
        std::fs::write(dir.path().join("f"), "K='v'\n").expect("file");
        let paths = ["f", "/f", "missing", "."].map(str::to_owned);
        let found = read(dir.path(), paths.into_iter());
        let parsed = EnvFile::parse(b"K='v'\n", &["K".to_owned()].into());
        let not_regular: EnvFile = FileProblem::Unreadable("not a regular file".to_owned()).into();
        for (path, expected) in
            [("f", &parsed), ("/f", &parsed), ("missing", &FileProblem::Missing.into()), (".", &not_regular)]
        {
            assert_eq!(found.get(&file(path.to_owned())), Some(expected), "{path}");
        }
    }

    #[test]
    fn the_files_of_a_container_have_a_limited_size_together() {
        let dir = tempfile::tempdir().expect("directory");
        let name = |index: usize| format!("f{index:02}");
        let content = [b"K='v'\n#".as_slice(), vec![b'x'; (1 << 20) - 7].as_slice()].concat();
        for index in 0..8 {
            std::fs::write(dir.path().join(name(index)), &content).expect("file");
        }
        let found = read(dir.path(), (0..8).map(name));
        let parsed = EnvFile::parse(&content, &["K".to_owned()].into());
        let good = found.values().filter(|found| **found == parsed).count();
        assert_eq!((found.len(), good), (8, 6));
        std::fs::write(dir.path().join("large"), [content.as_slice(), b"x"].concat()).expect("file");
        let large = read(dir.path(), std::iter::once("large".to_owned()));
        let too_large: EnvFile = FileProblem::Unreadable("larger than 1048576 bytes".to_owned()).into();
        assert_eq!(large.get(&file("large".to_owned())), Some(&too_large));
    }
}
