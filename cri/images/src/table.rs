//! The table of images, their names and reference counts. Decisions only, without I/O.

use std::collections::HashMap;

use crate::digest::Digest;
use crate::image::Image;
use crate::records::Record;
use crate::reference::{Reference, Target};

/// Minimum length of an id prefix; shorter hexadecimal strings are names.
const PREFIX_MIN: usize = 8;

/// All images of a store.
#[derive(Default)]
pub(crate) struct Table {
    entries: HashMap<Digest, Entry>,
    generation: u64,
}

/// Maximum difference between the time of last use in memory and on disk, in seconds.
const USE_LAG: u64 = 3600;

/// An image, its record and its reference count.
pub(crate) struct Entry {
    pub(crate) record: Record,
    pub(crate) image: Image,
    pub(crate) held: usize,
    /// Time of last use on disk.
    use_on_disk: u64,
}

/// Names that a reference gives to an image.
pub(crate) struct Names {
    /// Names with a tag.
    pub(crate) tags: Vec<String>,
    /// Names with a digest.
    pub(crate) digests: Vec<String>,
}

// === impl Table ===

impl Table {
    /// The next generation, greater than all existing generations.
    pub(crate) fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    /// Inserts an image. Replaces an image with the same id, and keeps its reference count.
    pub(crate) fn insert(&mut self, record: Record, image: Image) {
        self.generation = self.generation.max(record.generation);
        let held = self.entries.get(&record.id).map_or(0, |old| old.held);
        let use_on_disk = record.used;
        self.entries.insert(record.id, Entry { record, image, held, use_on_disk });
    }

    /// Removes an image unless it is held. The check and the removal are one step under the caller's lock, so that the
    /// image cannot be held in between.
    pub(crate) fn remove_unused(&mut self, id: &Digest) -> Option<Entry> {
        self.entries.get(id).filter(|entry| entry.held == 0)?;
        self.entries.remove(id)
    }

    /// An image by id, including an image that was removed while held.
    pub(crate) fn entry(&self, id: &Digest) -> Option<&Entry> {
        self.entries.get(id)
    }

    /// Like [`Table::entry`], mutable.
    pub(crate) fn entry_mut(&mut self, id: &Digest) -> Option<&mut Entry> {
        self.entries.get_mut(id)
    }

    /// All images, including images that were removed while held.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// All images that were not removed.
    pub(crate) fn list(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values().filter(|entry| !entry.record.removed)
    }

    /// Images that were removed and are no longer held.
    pub(crate) fn abandoned(&self) -> Vec<Digest> {
        let gone = self.entries.values().filter(|entry| entry.record.removed && entry.held == 0);
        gone.map(|entry| entry.record.id).collect()
    }

    /// Finds an image by id, by name, or by an unambiguous prefix of its id.
    pub(crate) fn find(&self, name_or_id: &str) -> Option<&Entry> {
        if let Some(id) = Digest::from_hex(name_or_id).or_else(|| name_or_id.parse().ok()) {
            return self.entries.get(&id).filter(|entry| !entry.record.removed);
        }
        let named = Reference::parse(name_or_id).ok().map(|reference| reference.to_string());
        if let Some(named) = named
            && let Some(entry) = self.list().find(|entry| has_name(&entry.record, &named))
        {
            return Some(entry);
        }
        let digits = name_or_id.strip_prefix("sha256:").unwrap_or(name_or_id);
        if digits.len() < PREFIX_MIN || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        let mut matching = self.list().filter(|entry| entry.record.id.hex().starts_with(digits));
        match (matching.next(), matching.next()) {
            (Some(only), None) => Some(only),
            _ => None,
        }
    }

    /// Whether an image of this repository exists, according to the digests.
    pub(crate) fn has_repository(&self, repository: &str) -> bool {
        let of = |digest: &String| digest.strip_prefix(repository).is_some_and(|rest| rest.starts_with('@'));
        self.list().any(|entry| entry.record.digests.iter().any(of))
    }

    /// The records to write when `new` is put into the table. The image gets the new names in addition to its own, and
    /// no other image keeps these tags. The image itself comes first, so that a tag always refers to an image. The
    /// image keeps its former owner.
    pub(crate) fn plan_put(&mut self, mut new: Record) -> Vec<Record> {
        if let Some(old) = self.entries.get(&new.id) {
            merge(&mut new.tags, &old.record.tags);
            merge(&mut new.digests, &old.record.digests);
            new.owner.clone_from(&old.record.owner);
        }
        new.generation = self.next_generation();
        let others: Vec<Record> = self
            .entries
            .values()
            .filter(|entry| entry.record.id != new.id)
            .filter(|entry| entry.record.tags.iter().any(|tag| new.tags.contains(tag)))
            .map(|entry| Record {
                tags: entry.record.tags.iter().filter(|tag| !new.tags.contains(tag)).cloned().collect(),
                generation: new.generation,
                ..entry.record.clone()
            })
            .collect();
        std::iter::once(new).chain(others).collect()
    }
}

// === impl Entry ===

impl Entry {
    /// Sets the time of use. Returns whether the time must be written to disk. Writes are rate-limited to spare flash
    /// memory.
    pub(crate) fn mark_used(&mut self, now: u64) -> bool {
        self.record.used = now;
        let late = now.abs_diff(self.use_on_disk) >= USE_LAG;
        if late {
            self.use_on_disk = now;
        }
        late
    }
}

/// Resolves conflicts after a crash: if two records have the same tag, the later record keeps the tag.
pub(crate) fn resolve_tag_conflicts(records: &mut [Record]) {
    records.sort_by_key(|record| std::cmp::Reverse(record.generation));
    let mut taken: Vec<String> = Vec::new();
    for record in records {
        record.tags.retain(|tag| !taken.contains(tag));
        taken.extend_from_slice(&record.tags);
    }
}

/// The tags and digests that a pull or an import of a reference adds.
pub(crate) fn names(reference: &Reference, digest: Option<Digest>) -> Names {
    let tags = match reference.target() {
        Target::Tag(_) => vec![reference.to_string()],
        Target::Digest(_) => Vec::new(),
    };
    let digests = digest.map(|digest| format!("{}@{digest}", reference.repository()));
    Names { tags, digests: digests.into_iter().collect() }
}

fn has_name(record: &Record, name: &str) -> bool {
    record.tags.iter().chain(&record.digests).any(|own| own == name)
}

fn merge(into: &mut Vec<String>, more: &[String]) {
    for name in more {
        if !into.contains(name) {
            into.push(name.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Table, resolve_tag_conflicts};
    use crate::digest::Digest;
    use crate::image::Image;
    use crate::records::{Record, VERSION};

    fn record(config: &str, tags: &[&str], digests: &[&str]) -> Record {
        let own = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
        Record {
            version: VERSION,
            id: Digest::of(config.as_bytes()),
            tags: own(tags),
            digests: own(digests),
            layers: vec![],
            size: 1,
            config: config.into(),
            removed: false,
            generation: 0,
            pulled: 0,
            owner: String::new(),
            used: 0,
        }
    }

    #[test]
    fn an_image_keeps_the_owner_of_its_first_pull() {
        let mut table = Table::default();
        for owner in ["first", "second"] {
            let id = put(&mut table, Record { owner: owner.into(), ..record("a", &[], &[]) });
            assert_eq!(table.entry(&id).unwrap().record.owner, "first");
        }
    }

    fn put(table: &mut Table, record: Record) -> Digest {
        let id = record.id;
        for record in table.plan_put(record) {
            let image = Image {
                id: record.id.to_string(),
                tags: record.tags.clone(),
                digests: record.digests.clone(),
                size: 1,
                config: Arc::default(),
                layers: vec![],
                pinned: false,
            };
            table.insert(record, image);
        }
        id
    }

    #[test]
    fn images_are_found_by_all_of_their_names_and_ids() {
        let mut table = Table::default();
        let digest = format!("docker.io/library/nginx@{}", Digest::of(b"manifest"));
        let id = put(&mut table, record("a", &["docker.io/library/nginx:latest"], &[&digest]));
        let short = &id.hex()[..12];
        for name in [
            "nginx",
            "library/nginx:latest",
            &digest,
            &id.to_string(),
            &id.hex(),
            short,
            &format!("sha256:{short}"),
        ] {
            assert_eq!(table.find(name).map(|e| e.record.id), Some(id), "{name}");
        }
        for name in ["nginx:1", "", "sha256:", &id.hex()[..4], "ffffffffffff"] {
            assert!(table.find(name).is_none(), "{name}");
        }
    }

    #[test]
    fn a_moved_tag_leaves_the_old_image_its_digest() {
        let mut table = Table::default();
        let old = put(&mut table, record("a", &["a.b/c:latest", "a.b/c:1"], &["a.b/c@sha256:old"]));
        let new = put(&mut table, record("b", &["a.b/c:latest"], &["a.b/c@sha256:new"]));
        assert_eq!(table.find("a.b/c").map(|e| e.record.id), Some(new));
        let left = &table.entry(&old).unwrap().record;
        assert_eq!((left.tags.as_slice(), left.digests.len()), (["a.b/c:1".to_owned()].as_slice(), 1));
        put(&mut table, record("b", &["x.y/z:1"], &[]));
        assert_eq!(table.entry(&new).unwrap().record.tags, ["x.y/z:1", "a.b/c:latest"]);
    }

    #[test]
    fn a_use_is_written_to_disk_once_an_hour() {
        let mut table = Table::default();
        let id = put(&mut table, Record { used: 10_000, ..record("a", &[], &[]) });
        let entry = table.entry_mut(&id).unwrap();
        let due = [10_001, 13_599, 13_600, 13_601, 17_200].map(|now| entry.mark_used(now));
        assert_eq!(due, [false, false, true, false, true]);
        assert_eq!(entry.record.used, 17_200);
        assert!(entry.mark_used(5), "the clock was set back");
    }

    #[test]
    fn the_later_of_two_records_keeps_a_tag() {
        let mut records = [record("a", &["t", "u"], &[]), record("b", &["t"], &[])];
        records[1].generation = 9;
        resolve_tag_conflicts(&mut records);
        assert_eq!(records[0].tags, ["t"]);
        assert_eq!(records[1].tags, ["u"]);
    }
}
