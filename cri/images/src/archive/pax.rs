//! Extended headers of POSIX tar: records of the form `length key=value\n`.

use super::{ArchiveError, Mtime, Segment};

/// Attributes that an extended header sets for the next entry.
#[derive(Debug, Default)]
pub(super) struct Pax {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) mtime: Option<Mtime>,
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Size of a sparse file including holes.
    pub(super) sparse_size: Option<u64>,
    /// Format 1.0: the segments are listed before the data.
    pub(super) sparse_map_in_data: bool,
    /// Formats 0.0 and 0.1: the segments.
    pub(super) sparse: Vec<Segment>,
}

const BAD: ArchiveError = ArchiveError::Damaged("bad extended header");

impl Pax {
    /// Parses the data of an extended header.
    pub(super) fn parse(mut data: &[u8]) -> Result<Pax, ArchiveError> {
        let mut pax = Pax::default();
        let mut sparse_name = None;
        while !data.is_empty() {
            let space = data.iter().position(|b| *b == b' ').ok_or(BAD)?;
            let length = usize::try_from(number(&data[..space])?).map_err(|_large| BAD)?;
            let record = data.get(space + 1..length).ok_or(BAD)?;
            let record = record.strip_suffix(b"\n").ok_or(BAD)?;
            let equals = record.iter().position(|b| *b == b'=').ok_or(BAD)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            if key == b"GNU.sparse.name" {
                sparse_name = Some(value.to_vec());
            } else {
                pax.set(key, value)?;
            }
            data = &data[length..];
        }
        // The normal path of a sparse entry is a placeholder for readers without support for sparse files.
        pax.path = sparse_name.or(pax.path);
        Ok(pax)
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), ArchiveError> {
        let text = || (!value.is_empty()).then(|| value.to_vec());
        match key {
            b"path" | b"linkpath" if value.contains(&0) => return Err(BAD),
            b"path" => self.path = text(),
            b"linkpath" => self.link = text(),
            b"size" => self.size = Some(number(value)?),
            b"uid" => self.uid = Some(number(value)?),
            b"gid" => self.gid = Some(number(value)?),
            b"mtime" => self.mtime = Some(time(value)?),
            b"GNU.sparse.major" => self.sparse_map_in_data = value != b"0",
            b"GNU.sparse.realsize" | b"GNU.sparse.size" => self.sparse_size = Some(number(value)?),
            b"GNU.sparse.offset" => self.sparse.push(Segment { offset: number(value)?, length: 0 }),
            b"GNU.sparse.numbytes" => self.sparse.last_mut().ok_or(BAD)?.length = number(value)?,
            b"GNU.sparse.map" => self.sparse = map(value)?,
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    self.xattrs.push((name.to_vec(), value.to_vec()));
                }
            }
        }
        Ok(())
    }
}

fn number(digits: &[u8]) -> Result<u64, ArchiveError> {
    std::str::from_utf8(digits).ok().and_then(|text| text.parse().ok()).ok_or(BAD)
}

fn map(value: &[u8]) -> Result<Vec<Segment>, ArchiveError> {
    if value.is_empty() {
        return Ok(Vec::new());
    }
    let numbers = value.split(|b| *b == b',').map(number).collect::<Result<Vec<u64>, _>>()?;
    if numbers.len() % 2 != 0 {
        return Err(BAD);
    }
    Ok(numbers.chunks_exact(2).map(|pair| Segment { offset: pair[0], length: pair[1] }).collect())
}

/// Seconds with a fraction: `1350244992.023960108`, possibly negative.
fn time(value: &[u8]) -> Result<Mtime, ArchiveError> {
    let text = std::str::from_utf8(value).map_err(|_not_text| BAD)?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().map_err(|_bad| BAD)?;
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanoseconds: u32 = digits.parse().map_err(|_bad| BAD)?;
    if whole.starts_with('-') && nanoseconds > 0 {
        return Ok(Mtime {
            seconds: seconds.checked_sub(1).ok_or(BAD)?,
            nanoseconds: 1_000_000_000 - nanoseconds,
        });
    }
    Ok(Mtime { seconds, nanoseconds })
}

#[cfg(test)]
mod tests {
    use super::{Mtime, Pax, time};

    #[test]
    fn times_may_have_fractions_and_signs() {
        for (text, seconds, nanoseconds) in [
            ("1350244992.023960108", 1_350_244_992, 23_960_108),
            ("0", 0, 0),
            ("12.5", 12, 500_000_000),
            ("-1.25", -2, 750_000_000),
            ("-3", -3, 0),
        ] {
            assert_eq!(time(text.as_bytes()).unwrap(), Mtime { seconds, nanoseconds }, "{text}");
        }
        assert!(time(b"x").is_err());
    }

    #[test]
    fn damaged_headers_are_refused() {
        for bad in [
            "x",
            "5 a",
            "99 path=a\n",
            "0 path=a\n",
            "8 path=a\n",
            "10 path\n",
            "12 size=abc\n",
            "11 path=\0a\n",
        ] {
            assert!(Pax::parse(bad.as_bytes()).is_err(), "{bad:?}");
        }
    }
}
