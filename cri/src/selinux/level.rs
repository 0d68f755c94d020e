//! SELinux levels: validation, and the levels in use. Pure, except for the random choice.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::lock::locked;

/// Number of categories of container policies: c0 to c1023.
const CATEGORIES: u32 = 1024;

/// The levels of pods and containers. Two pods have the same level only on request.
#[derive(Debug, Default)]
pub(super) struct Levels {
    /// Levels in use, by the id of the pod or container.
    held: Mutex<HashMap<String, String>>,
}

// === impl Levels ===

impl Levels {
    /// Marks a level as used. Several owners can request the same level.
    pub(super) fn hold(&self, id: &str, level: &str) {
        locked(&self.held).insert(id.to_owned(), level.to_owned());
    }

    /// Chooses an unused level. `None` if all are used.
    pub(super) fn pick(&self, id: &str) -> Option<String> {
        let mut held = locked(&self.held);
        let level = free(rand::random(), |level| held.values().any(|taken| taken == level))?;
        held.insert(id.to_owned(), level.clone());
        Some(level)
    }

    pub(super) fn release(&self, id: &str) {
        locked(&self.held).remove(id);
    }
}

/// The first unused pair of categories from `start`.
fn free(start: u32, taken: impl Fn(&str) -> bool) -> Option<String> {
    let all = CATEGORIES * CATEGORIES;
    let pairs = (0..all).map(|step| (start % all + step) % all).map(|at| (at / CATEGORIES, at % CATEGORIES));
    pairs
        .filter(|(low, high)| low < high)
        .map(|(low, high)| format!("s0:c{low},c{high}"))
        .find(|level| !taken(level))
}

/// Validates a level: a sensitivity or a range of two, and categories or ranges of categories.
pub(super) fn check(level: &str) -> Result<(), String> {
    let (range, categories) =
        level.split_once(':').map_or((level, None), |(range, rest)| (range, Some(rest)));
    let is_range = is_one_or_range(range, '-', |part| is_lettered_number(part, 's', 1));
    let are_categories = categories.is_none_or(|list| {
        list.split(',').all(|part| is_one_or_range(part, '.', |one| is_lettered_number(one, 'c', 4)))
    });
    if is_range && are_categories {
        Ok(())
    } else {
        Err(format!("{level:?} is not a level such as s0:c1,c2"))
    }
}

fn is_one_or_range(text: &str, between: char, is_one: impl Fn(&str) -> bool) -> bool {
    match text.split_once(between) {
        Some((one, other)) => is_one(one) && is_one(other),
        None => is_one(text),
    }
}

/// Whether the text is this letter and a number of at most `most` digits.
fn is_lettered_number(text: &str, letter: char, most: usize) -> bool {
    text.strip_prefix(letter).is_some_and(|digits| {
        (1..=most).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_levels_are_refused() {
        for right in ["s0", "s0-s0", "s0:c4,c5", "s0-s0:c0.c1023", "s0:c1,c3.c5,c9", "s1:c0"] {
            assert_eq!(check(right), Ok(()), "{right}");
        }
        for wrong in [
            "",
            "s",
            "s0,c4,c5",
            "s10",
            "s0:",
            "s0:c",
            "s0:c4,",
            "s0:c12345",
            "s0:c1.c2.c3",
            "s0-s0-s0",
            "c1",
            "s0:c1 ",
        ] {
            assert!(check(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn chosen_levels_are_unique() {
        let levels = Levels::default();
        let mut given: Vec<String> = (0..200).filter_map(|id| levels.pick(&id.to_string())).collect();
        given.sort();
        given.dedup();
        assert_eq!(given.len(), 200);
        assert!(given.iter().all(|level| check(level).is_ok()), "{given:?}");
    }

    #[test]
    fn the_next_unused_pair_is_found_from_any_start() {
        assert_eq!(free(1, |_| false).as_deref(), Some("s0:c0,c1"));
        assert_eq!(free(1, |level| level == "s0:c0,c1").as_deref(), Some("s0:c0,c2"));
        // After the last pair the search continues at the first pair.
        assert_eq!(free(CATEGORIES * CATEGORIES - 1, |_| false).as_deref(), Some("s0:c0,c1"));
        assert_eq!(free(u32::MAX, |level| level != "s0:c1022,c1023").as_deref(), Some("s0:c1022,c1023"));
        assert_eq!(free(7, |_| true), None);
    }

    #[test]
    fn a_level_is_used_until_it_is_released() {
        let levels = Levels::default();
        levels.hold("pod", "s0:c1,c2");
        assert!(locked(&levels.held).values().any(|level| level == "s0:c1,c2"));
        levels.release("pod");
        assert!(locked(&levels.held).is_empty());
    }
}
