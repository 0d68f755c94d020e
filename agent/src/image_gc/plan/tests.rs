use super::*;

const MINUTE: i64 = 60;
const HOUR: i64 = 60 * MINUTE;
const NOW: i64 = 1_800_000_000;

fn at(seconds_ago: i64) -> Timestamp {
    Timestamp::from_second(NOW - seconds_ago).unwrap()
}

/// An image that came a day ago, with layers `name:bytes`.
fn image(id: &str, used_ago: i64, layers: &[(&str, u64)]) -> Image {
    Image {
        id: id.to_owned(),
        names: vec![format!("{id}:latest")],
        pinned: false,
        in_use: false,
        pulled: at(24 * HOUR),
        used: at(used_ago),
        layers: layers.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect(),
    }
}

fn planned(
    policy: &ImageGcPolicy,
    need: SpaceToFree,
    images: &[Image],
) -> (Vec<(String, u64)>, Option<Duration>) {
    let plan = plan(policy, need, images, at(0));
    (plan.removals.into_iter().map(|removal| (removal.id, removal.bytes)).collect(), plan.again)
}

fn chosen(need: SpaceToFree, images: &[Image]) -> Vec<(String, u64)> {
    planned(&ImageGcPolicy::default(), need, images).0
}

fn pairs(of: &[(&str, u64)]) -> Vec<(String, u64)> {
    of.iter().map(|(id, bytes)| ((*id).to_owned(), *bytes)).collect()
}

#[test]
fn at_the_high_threshold_space_is_freed_down_to_the_low_one() {
    let policy = ImageGcPolicy::default();
    let of = |available, no_room| {
        let disk = Disk { capacity: 1000, available, inodes: 100, inodes_free: 50 };
        need(&policy, &disk, no_room)
    };
    assert_eq!(of(1000, false), SpaceToFree::Nothing);
    assert_eq!(of(160, false), SpaceToFree::Nothing);
    // 15.9 % free are 85 % in use: the kubelet rounds the free space down.
    assert_eq!(of(159, false), SpaceToFree::Bytes(41));
    assert_eq!(of(150, false), SpaceToFree::Bytes(50));
    assert_eq!(of(0, false), SpaceToFree::Bytes(200));
    assert_eq!(of(2000, false), SpaceToFree::Nothing);
}

#[test]
fn a_pull_without_space_frees_twice_the_available_space() {
    let of = |available, policy: &ImageGcPolicy| {
        let disk = Disk { capacity: 1000, available, inodes: 0, inodes_free: 0 };
        need(policy, &disk, true)
    };
    let policy = ImageGcPolicy::default();
    assert_eq!(of(300, &policy), SpaceToFree::Bytes(300));
    assert_eq!(of(10, &policy), SpaceToFree::Bytes(190));
    assert_eq!(of(700, &policy), SpaceToFree::Bytes(300));
    assert_eq!(of(1000, &policy), SpaceToFree::Nothing);
    assert_eq!(of(10, &ImageGcPolicy { high_threshold: 100, ..policy }), SpaceToFree::Nothing);
}

#[test]
fn a_lack_of_inodes_removes_all_removable_images() {
    let disk = Disk { capacity: 1000, available: 900, inodes: 100, inodes_free: 4 };
    let policy = ImageGcPolicy::default();
    assert_eq!(need(&policy, &disk, false), SpaceToFree::All);
    assert_eq!(need(&policy, &Disk { inodes_free: 5, ..disk }, false), SpaceToFree::Nothing);
    let images = [image("a", HOUR, &[("a", 1)]), Image { pinned: true, ..image("b", HOUR, &[("b", 1)]) }];
    assert_eq!(chosen(SpaceToFree::All, &images), pairs(&[("a", 1)]));
}

#[test]
fn the_least_recently_used_are_removed_first_and_no_more_than_needed() {
    let images = [
        image("new", HOUR, &[("new", 100)]),
        image("oldest", 9 * HOUR, &[("oldest", 100)]),
        image("old", 5 * HOUR, &[("old", 100)]),
    ];
    assert_eq!(chosen(SpaceToFree::Bytes(1), &images), pairs(&[("oldest", 100)]));
    assert_eq!(chosen(SpaceToFree::Bytes(100), &images), pairs(&[("oldest", 100)]));
    assert_eq!(chosen(SpaceToFree::Bytes(101), &images), pairs(&[("oldest", 100), ("old", 100)]));
    assert_eq!(chosen(SpaceToFree::Bytes(900), &images).len(), 3);
    assert_eq!(chosen(SpaceToFree::Nothing, &images), []);
}

#[test]
fn images_with_equal_use_are_removed_by_the_time_of_their_pull() {
    let earlier = Image { pulled: at(48 * HOUR), ..image("earlier", HOUR, &[("earlier", 1)]) };
    let images = [image("a", HOUR, &[("a", 1)]), earlier];
    assert_eq!(chosen(SpaceToFree::Bytes(1), &images), pairs(&[("earlier", 1)]));
}

#[test]
fn pinned_and_used_images_are_never_removed() {
    let images = [
        Image { pinned: true, ..image("pinned", 9 * HOUR, &[("pinned", 100)]) },
        Image { in_use: true, ..image("used", 9 * HOUR, &[("used", 100)]) },
        image("free", HOUR, &[("free", 100)]),
    ];
    assert_eq!(chosen(SpaceToFree::Bytes(300), &images), pairs(&[("free", 100)]));
    assert_eq!(chosen(SpaceToFree::All, &images), pairs(&[("free", 100)]));
}

#[test]
fn a_layer_is_freed_with_its_last_image() {
    let images = [
        image("first", 3 * HOUR, &[("base", 100), ("first", 1)]),
        image("second", 2 * HOUR, &[("base", 100), ("second", 1)]),
        image("third", HOUR, &[("third", 5)]),
    ];
    let expected = pairs(&[("first", 1), ("second", 101)]);
    assert_eq!(chosen(SpaceToFree::Bytes(50), &images), expected);
    assert_eq!(chosen(SpaceToFree::Bytes(103), &images).len(), 3);
    // An image without layers of its own frees no space, because another image keeps its layers. Such an image is not
    // removed.
    let images = [
        Image { in_use: true, ..image("used", HOUR, &[("base", 100), ("used", 1)]) },
        image("part", 3 * HOUR, &[("base", 100)]),
        image("empty", 3 * HOUR, &[]),
        image("more", 2 * HOUR, &[("base", 100), ("more", 7)]),
    ];
    assert_eq!(chosen(SpaceToFree::Bytes(1000), &images), pairs(&[("more", 7)]));
}

#[test]
fn images_within_the_minimum_age_are_awaited() {
    let policy = ImageGcPolicy::default();
    let came = |id: &str, ago| Image { pulled: at(ago), ..image(id, ago, &[(id, 100)]) };
    let images = [came("late", 10), came("soon", 119), came("old", 120), came("ahead", -HOUR)];
    let (removed, again) = planned(&policy, SpaceToFree::Bytes(400), &images);
    assert_eq!(removed, pairs(&[("old", 100), ("ahead", 100)]));
    assert_eq!(again, Some(Duration::from_secs(1)));
    assert_eq!(planned(&policy, SpaceToFree::Bytes(100), &images).1, None, "older images are enough");
    let never = ImageGcPolicy { minimum_age: Duration::ZERO, ..policy };
    assert_eq!(planned(&never, SpaceToFree::Bytes(400), &images).0.len(), 4);
}

#[test]
fn images_over_their_maximum_age_are_removed_although_there_is_room() {
    let policy = ImageGcPolicy { maximum_age: Duration::from_secs(3600), ..ImageGcPolicy::default() };
    let images = [
        image("over", HOUR + 1, &[("over", 10)]),
        image("just", HOUR, &[("just", 10)]),
        Image { in_use: true, ..image("used", 9 * HOUR, &[("over", 10)]) },
        Image { pinned: true, ..image("pinned", 9 * HOUR, &[("pinned", 10)]) },
    ];
    assert_eq!(planned(&policy, SpaceToFree::Nothing, &images).0, pairs(&[("over", 0)]));
    assert_eq!(planned(&ImageGcPolicy::default(), SpaceToFree::Nothing, &images).0, []);
}
