//! Reads files of the configuration, with a limit on their size.

use std::{fs::File, io::Read as _, path::Path};

/// The content of a file of at most `max` bytes.
///
/// # Errors
/// The file cannot be read, or is larger. The error does not name the file.
pub(crate) fn read(path: &Path, max: u64) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(max.saturating_add(1)).read_to_end(&mut bytes));
    read.map_err(|error| error.to_string())?;
    match bytes.len() as u64 > max {
        true => Err(format!("it is larger than {max} bytes")),
        false => Ok(bytes),
    }
}

/// The text of a file of at most `max` bytes.
///
/// # Errors
/// As [`read`]. Or the file is not UTF-8.
pub(crate) fn read_text(path: &Path, max: u64) -> Result<String, String> {
    String::from_utf8(read(path, max)?).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_files_and_invalid_utf8_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "text").unwrap();
        assert_eq!(read_text(&path, 4).as_deref(), Ok("text"));
        assert_eq!(read(&path, 3), Err("it is larger than 3 bytes".to_owned()));
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(read(&path, 1), Ok(vec![0xff]));
        assert!(read_text(&path, 1).is_err());
        assert!(read(&dir.path().join("absent"), 1).is_err());
    }
}
