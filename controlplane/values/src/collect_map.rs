//! Collects pairs into maps.

/// Collects pairs into a map by inserting them one after the other.
///
/// `collect` into a `BTreeMap` sorts the pairs first. The compiler generates the code of the sort, about 6 kB, for each
/// call, because the sort depends on the type of the iterator. Insertion has one function per type of map. It is slower
/// for many sorted pairs.
pub trait CollectMap: Iterator + Sized {
    /// The map. The last of the values of a key wins.
    fn collect_map<M: Default + Extend<Self::Item>>(self) -> M {
        let mut map = M::default();
        map.extend(self);
        map
    }
}

impl<I: Iterator> CollectMap for I {}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_last_value_of_a_key_wins() {
        let map: BTreeMap<&str, u8> = [("b", 1), ("a", 2), ("b", 3)].into_iter().collect_map();
        assert_eq!(map, BTreeMap::from([("a", 2), ("b", 3)]));
    }
}
