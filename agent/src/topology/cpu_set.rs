//! A set of CPU numbers, in the kernel's list format: `0-3,7`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Maximum number of a CPU. Larger numbers are refused, because a range allocates memory for each of its numbers. The
/// kernel has at most 8,192 CPUs (`NR_CPUS`).
const MAX_NUMBER: u32 = 65_535;

/// A set of CPU numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuSet(BTreeSet<u32>);

/// The text is not a list of CPUs.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a list of CPUs such as 0-3,7")]
pub struct CpuSetError(String);

// === impl CpuSet ===

impl CpuSet {
    /// The set without CPUs.
    pub(crate) const EMPTY: Self = Self(BTreeSet::new());

    pub(crate) fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set has no CPUs.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The numbers in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    pub(crate) fn union(&self, other: &Self) -> Self {
        Self(&self.0 | &other.0)
    }

    pub(crate) fn intersection(&self, other: &Self) -> Self {
        Self(&self.0 & &other.0)
    }

    /// The CPUs of this set that are not in the other set.
    pub(crate) fn difference(&self, other: &Self) -> Self {
        Self(&self.0 - &other.0)
    }

    pub(crate) fn is_subset(&self, other: &Self) -> bool {
        self.0.is_subset(&other.0)
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for cpu in self.iter() {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        for (at, (first, last)) in ranges.into_iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for CpuSet {
    type Err = CpuSetError;

    /// Parses a list. An empty text is the empty set.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || CpuSetError(text.chars().take(256).collect());
        let number = |text: &str| text.parse::<u32>().ok().filter(|number| *number <= MAX_NUMBER);
        let mut cpus = BTreeSet::new();
        for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let range = number(first).zip(number(last)).filter(|(first, last)| first <= last);
            let (first, last) = range.ok_or_else(invalid)?;
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

impl TryFrom<String> for CpuSet {
    type Error = CpuSetError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<CpuSet> for String {
    fn from(cpus: CpuSet) -> Self {
        cpus.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_parsed_and_written_in_the_kernels_format() {
        for (text, written) in [
            ("", ""),
            ("0", "0"),
            ("0-3", "0-3"),
            ("3,1,2", "1-3"),
            ("0-1,5,7-9\n", "0-1,5,7-9"),
            ("2-2", "2"),
        ] {
            assert_eq!(text.parse::<CpuSet>().unwrap().to_string(), written, "{text}");
        }
        for wrong in ["a", "1-", "-1", "3-1", "1,,2", "0-4294967295", "1 2"] {
            assert!(wrong.parse::<CpuSet>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn sets_are_combined() {
        let set = |text: &str| text.parse::<CpuSet>().unwrap();
        assert_eq!(set("0-3").difference(&set("1,5")), set("0,2-3"));
        assert_eq!(set("0-3").intersection(&set("2-5")), set("2-3"));
        assert_eq!(set("0-1").union(&set("4")), set("0-1,4"));
        assert!(set("1").is_subset(&set("0-1")) && !set("2").is_subset(&set("0-1")));
    }
}
