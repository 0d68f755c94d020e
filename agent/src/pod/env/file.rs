//! Variables from files in volumes: `valueFrom.fileKeyRef`.
//!
//! A file has the format of upstream's `pkg/kubelet/util/env`: lines `NAME='value'`. A value may have several lines and
//! cannot contain a single quote; nothing in it is expanded. Empty lines, and text after `#` outside of a value, are
//! ignored. The first value of a name counts, even if a later line is invalid.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, FileKeySelector};

use super::EnvError;

/// Maximum bytes of a file.
pub(crate) const FILE_MAX: u64 = 1 << 20;

const BLANKS: [char; 2] = [' ', '\t'];

/// A file of a volume.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FileName {
    pub(crate) volume: String,
    /// Path in the volume.
    pub(crate) path: String,
}

impl FileName {
    fn of(reference: &FileKeySelector) -> Self {
        Self { volume: reference.volume_name.clone(), path: reference.path.clone() }
    }
}

/// The error that ended the reading of a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FileProblem {
    #[error("the file does not exist")]
    Missing,
    #[error("{0}")]
    Unreadable(String),
    #[error("invalid environment variable format at line {line}: {what}")]
    Format { line: usize, what: &'static str },
}

/// The referenced values of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EnvFile {
    values: BTreeMap<String, String>,
    problem: Option<FileProblem>,
}

impl EnvFile {
    /// Reads the values of these keys.
    pub(crate) fn parse(content: &[u8], keys: &BTreeSet<String>) -> Self {
        let text = String::from_utf8_lossy(content);
        let lines = text.split('\n').map(|line| line.strip_suffix('\r').unwrap_or(line));
        let mut file = Self::default();
        let problem = file.take(&mut (1..).zip(lines), keys).err();
        Self { problem, ..file }
    }

    fn take<'a>(
        &mut self,
        lines: &mut impl Iterator<Item = (usize, &'a str)>,
        keys: &BTreeSet<String>,
    ) -> Result<(), FileProblem> {
        while let Some((number, line)) = lines.next() {
            let line = line.trim_start_matches(BLANKS);
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (name, rest) = line.split_once('=').ok_or(invalid(number, "missing '='"))?;
            if name.is_empty() {
                return Err(invalid(number, "empty variable name"));
            }
            if name.ends_with(BLANKS) {
                return Err(invalid(number, "whitespace before '=' is not allowed"));
            }
            // As in a shell, a blank after `=` means an empty value. The rest of the line does not belong to the value.
            let is_empty = rest.starts_with(BLANKS);
            let value = if is_empty { String::new() } else { quoted(rest, number, lines)? };
            if keys.contains(name) {
                self.values.entry(name.to_owned()).or_insert(value);
            }
        }
        Ok(())
    }
}

impl From<FileProblem> for EnvFile {
    fn from(problem: FileProblem) -> Self {
        Self { values: BTreeMap::new(), problem: Some(problem) }
    }
}

/// Reads the value in single quotes at the start of `rest`, which may continue on the next lines.
fn quoted<'a>(
    rest: &'a str,
    start: usize,
    lines: &mut impl Iterator<Item = (usize, &'a str)>,
) -> Result<String, FileProblem> {
    let unquoted = invalid(start, "value must be enclosed in single quotes");
    let (mut number, mut rest) = (start, rest.strip_prefix('\'').ok_or(unquoted)?);
    let mut value = String::new();
    loop {
        if let Some((part, after)) = rest.split_once('\'') {
            value.push_str(part);
            let after = after.trim_start_matches(BLANKS);
            return match after.is_empty() || after.starts_with('#') {
                true => Ok(value),
                false => Err(invalid(number, "unexpected content after closing quote")),
            };
        }
        value.extend([rest, "\n"]);
        (number, rest) = lines.next().ok_or(invalid(start, "unclosed single quote"))?;
    }
}

fn invalid(line: usize, what: &'static str) -> FileProblem {
    FileProblem::Format { line, what }
}

/// Fuzz target. The input has the names of the wanted variables, a zero byte, and the file.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let mut parts = data.splitn(2, |byte| *byte == 0);
    let (names, content) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let keys: BTreeSet<String> = String::from_utf8_lossy(names).split(',').map(str::to_owned).collect();
    let file = EnvFile::parse(content, &keys);
    assert!(file.values.keys().all(|name| keys.contains(name)));
    // An invalid byte becomes U+FFFD, which has three bytes.
    let size: usize = file.values.values().map(String::len).sum();
    assert!(size <= 3 * content.len(), "{size} bytes of {}", content.len());
}

/// The files that a container's environment refers to, and the keys of each.
pub(crate) fn wanted_keys(container: &Container) -> BTreeMap<FileName, BTreeSet<String>> {
    let mut files: BTreeMap<FileName, BTreeSet<String>> = BTreeMap::new();
    let sources = container.env.iter().flatten().filter_map(|var| var.value_from.as_ref());
    for reference in sources.filter_map(|source| source.file_key_ref.as_ref()) {
        files.entry(FileName::of(reference)).or_default().insert(reference.key.clone());
    }
    files
}

/// The value of a reference. None if the reference is optional and the file or the key is missing. As upstream, an
/// empty value counts as missing.
pub(super) fn value(
    files: &BTreeMap<FileName, EnvFile>,
    reference: &FileKeySelector,
) -> Result<Option<String>, EnvError> {
    let optional = reference.optional == Some(true);
    let Some(file) = files.get(&FileName::of(reference)) else {
        return Err(EnvError::NoFileVolume(reference.volume_name.clone()));
    };
    match (file.values.get(&reference.key), &file.problem) {
        (Some(value), _) if !value.is_empty() => Ok(Some(value.clone())),
        (None, Some(FileProblem::Missing)) if optional => Ok(None),
        (None, Some(problem)) => Err(EnvError::File(problem.clone())),
        _ if optional => Ok(None),
        _ => Err(EnvError::NoFileKey { key: reference.key.clone(), path: reference.path.clone() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(key: &str, optional: bool) -> FileKeySelector {
        FileKeySelector {
            key: key.to_owned(),
            optional: Some(optional),
            path: "f".to_owned(),
            volume_name: "v".to_owned(),
        }
    }

    /// The value of the key `K` in a file, or the problem.
    fn of(text: &str) -> Result<String, FileProblem> {
        let file = EnvFile::parse(text.as_bytes(), &["K".to_owned()].into());
        match (file.values.get("K"), file.problem) {
            (Some(value), _) => Ok(value.clone()),
            (None, Some(problem)) => Err(problem),
            (None, None) => Err(FileProblem::Missing),
        }
    }

    #[test]
    fn values_are_in_single_quotes_and_stay_as_they_are() {
        for (text, expected) in [
            ("K='v'", "v"),
            ("A='x'\n \t K='v'\n", "v"),
            ("# K='no'\n\n   # K='no'\nK='v' # text", "v"),
            ("K='a#b=$C ${D} \\n \"e\"'", "a#b=$C ${D} \\n \"e\""),
            ("K='  v  '", "  v  "),
            ("K='one\n\n  # three  \nK=4'\n", "one\n\n  # three  \nK=4"),
            ("A='\nK=\n'\nK='v'", "v"),
            ("K='a\r\nb'\r\n", "a\nb"),
            ("K='v'\r", "v"),
            ("K='first'\nK='second'\n", "first"),
            ("K='v'\nno variable\n", "v"),
            ("K= 'v'", ""),
            ("K=''", ""),
            ("K='ä🌍'", "ä🌍"),
        ] {
            assert_eq!(of(text).as_deref(), Ok(expected), "{text:?}");
        }
        assert_eq!(EnvFile::parse(b"K='\xff'", &["K".to_owned()].into()).values["K"], "\u{fffd}");
        assert_eq!(of("k='v'\nKK='v'"), Err(FileProblem::Missing));
    }

    #[test]
    fn an_invalid_line_is_reported_with_its_number() {
        for (text, line, what) in [
            ("A='x'\nno variable\nK='v'", 2, "missing '='"),
            ("='x'\nK='v'", 1, "empty variable name"),
            ("K ='v'", 1, "whitespace before '=' is not allowed"),
            ("K=v", 1, "value must be enclosed in single quotes"),
            ("K=\"v\"", 1, "value must be enclosed in single quotes"),
            ("K=", 1, "value must be enclosed in single quotes"),
            ("K='a''b'", 1, "unexpected content after closing quote"),
            ("A='x'\nK='a\nb' c", 3, "unexpected content after closing quote"),
            ("A='x'\nK='a\nb\n", 2, "unclosed single quote"),
        ] {
            assert_eq!(of(text), Err(FileProblem::Format { line, what }), "{text:?}");
        }
    }

    #[test]
    fn only_an_optional_key_or_file_may_be_missing() {
        let of = |file: EnvFile, key: &str, optional| {
            let name = FileName { volume: "v".to_owned(), path: "f".to_owned() };
            value(&[(name, file)].into(), &reference(key, optional))
        };
        let read = || EnvFile::parse(b"A='x'\nE=''\nno variable\n", &["A", "E"].map(str::to_owned).into());
        let complete = || EnvFile::parse(b"A='x'\nE=''\n", &["A", "E", "K"].map(str::to_owned).into());
        assert_eq!(of(read(), "A", false), Ok(Some("x".to_owned())));
        for key in ["E", "K"] {
            assert_eq!(of(complete(), key, true), Ok(None));
            let missing = of(complete(), key, false).expect_err("missing").to_string();
            assert_eq!(missing, format!("environment variable key {key:?} not found in file \"f\""));
        }
        assert_eq!(of(FileProblem::Missing.into(), "A", true), Ok(None));
        for (file, optional) in [(FileProblem::Missing.into(), false), (read(), true)] {
            let error = of(file, "K", optional).expect_err("no value").to_string();
            assert!(error.starts_with("couldn't parse env file: "), "{error}");
        }
        let no_volume = value(&BTreeMap::new(), &reference("A", true)).expect_err("no volume").to_string();
        assert_eq!(no_volume, "cannot find the volume \"v\" referenced by FileKeyRef");
    }

    #[test]
    fn the_keys_of_a_file_are_read_at_once() {
        let var = |key: &str, path: &str| {
            serde_json::json!({"name": key, "valueFrom":
                {"fileKeyRef": {"volumeName": "v", "path": path, "key": key}}})
        };
        let container: Container = serde_json::from_value(serde_json::json!({"name": "c", "env":
            [var("A", "f"), var("B", "g"), var("C", "f"), {"name": "D", "value": "d"}]}))
        .expect("container");
        let found = wanted_keys(&container);
        let keys = |path: &str| {
            let name = FileName { volume: "v".to_owned(), path: path.to_owned() };
            found.get(&name).map(|keys| keys.iter().map(String::as_str).collect::<Vec<_>>())
        };
        assert_eq!((keys("f"), keys("g"), found.len()), (Some(vec!["A", "C"]), Some(vec!["B"]), 2));
    }
}
