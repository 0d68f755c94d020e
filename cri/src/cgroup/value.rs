//! Values of cgroup files. An absent, unreadable or invalid file is `None`: a cgroup may be removed at any time.

use super::Cgroups;

/// v1 writes "no limit" as a page-aligned `i64::MAX`.
const UNLIMITED: u64 = 1 << 62;

impl Cgroups {
    /// The text of a file.
    pub(crate) fn text(&self, controller: &str, group: &str, name: &str) -> Option<String> {
        std::fs::read_to_string(self.file(controller, group, name)?).ok()
    }

    /// A file with one number.
    pub(crate) fn number(&self, controller: &str, group: &str, name: &str) -> Option<u64> {
        self.text(controller, group, name)?.trim().parse().ok()
    }

    /// A limit. `None` if unlimited: `max` on v2, a huge or negative number on v1.
    pub(crate) fn limit(&self, controller: &str, group: &str, name: &str) -> Option<u64> {
        self.number(controller, group, name).filter(|limit| *limit < UNLIMITED)
    }

    /// The name of a file or field that differs between v1 and v2.
    pub(crate) fn select<'a>(&self, v1: &'a str, v2: &'a str) -> &'a str {
        if self.unified() { v2 } else { v1 }
    }

    /// Number of processes in a group and its descendants, for statistics.
    pub(crate) fn process_count(&self, group: &str) -> u64 {
        u64::try_from(self.processes_for_statistics(group).len()).unwrap_or(u64::MAX)
    }
}

/// A field of a file with one name and number per line.
pub(crate) fn field(stat: &str, name: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let stat = "rss 1\ntotal_rss 2\ntotal_rss_huge 3\n";
        assert_eq!(field(stat, "rss"), Some(1));
        assert_eq!(field(stat, "total_rss"), Some(2));
        assert_eq!(field(stat, "total"), None);
    }
}
