//! Hard links from one layer to files of another, checked in an overlayfs mount of the image.

use std::os::unix::fs::MetadataExt;
use std::process::Command;

use super::{nothing_left, store};
use crate::fixture::{TestImage, TestRegistry, TestTar, attributes, layer};
use crate::{ErrorKind, Image};

/// Output lines of a shell script in a read-only mount of the image.
fn in_image(image: &Image, script: &str) -> Vec<String> {
    let place = tempfile::tempdir().unwrap();
    let lower: Vec<String> = image.layers.iter().map(|layer| layer.display().to_string()).collect();
    let mount = "mount -t overlay -o \"lowerdir=$1\" overlay \"$2\" && cd \"$2\" && eval \"$3\"";
    // A read-only overlayfs mount needs two lower directories: an empty one is added for images of one layer.
    let lower = format!("{}:{}", lower.join(":"), place.path().display());
    let view = tempfile::tempdir().unwrap();
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-ec", mount, "sh", &lower])
        .arg(view.path())
        .arg(script)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

fn base(content: &str) -> (Vec<u8>, crate::digest::Digest) {
    layer(
        TestTar::new()
            .with(b'5', "tmp", "", attributes(0o1777, 0, 0, 7))
            .with(b'5', "bin", "", attributes(0o711, 5, 6, 1_100_000_000))
            .pax(&[("SCHILY.xattr.user.note", b"kept"), ("mtime", b"1200000000")])
            .with(b'0', "bin/tool", "", attributes(0o4755, 12, 34, 1_200_000_000))
            .directory("usr")
            .file("usr/text", content.as_bytes())
            .symlink("lib", "usr")
            .symlink("usr/away", "/etc/hostname"),
    )
}

/// A layer with links to all files. It is the same for every image.
fn linking() -> (Vec<u8>, crate::digest::Digest) {
    layer(
        TestTar::new()
            .hard_link("tmp/tool", "bin/tool")
            .hard_link("again", "tmp/tool")
            .hard_link("text", "lib/text")
            .hard_link("away", "/usr/away")
            .file("own", b"own"),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_links_to_the_layers_below_it_in_each_image() {
    let registry = TestRegistry::start().await;
    let top = layer(TestTar::new().file("top", b"").file(".wh.again", b""));
    registry.push("r", "one", &TestImage::new(vec![base("one"), linking(), top])).await;
    registry.push("r", "two", &TestImage::new(vec![base("two"), linking()])).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let one = images.pull(&registry.name("r:one"), None, None).await.unwrap();
    let two = images.pull(&registry.name("r:two"), None, None).await.unwrap();
    let script = "cat text own; echo; stat -c '%a %u:%g %Y %i' bin/tool tmp/tool; \
                stat -c '%a %u:%g' tmp bin; readlink away; ls again 2>&1 || true; stat -c %i usr/text text";
    for (image, content) in [(&one, "one"), (&two, "two")] {
        let output = in_image(image, script);
        assert_eq!(output[0], format!("{content}own"));
        assert!(output[1].starts_with("4755 12:34 1200000000 "), "{output:?}");
        assert_eq!(output[1], output[2], "one inode");
        assert_eq!(output[3..=5], ["1777 0:0", "711 5:6", "/etc/hostname"]);
        assert_eq!(output[6] == "again", content == "two", "{output:?}");
        assert_eq!(output[7], output[8], "one inode");
        let topmost = image.layers.iter().map(|layer| layer.join("tmp/tool")).find(|path| path.exists());
        assert_eq!(xattr::get(topmost.unwrap(), "user.note").unwrap().as_deref(), Some(b"kept".as_slice()));
    }
    let shared: Vec<_> = one.layers.iter().filter(|layer| two.layers.contains(layer)).collect();
    assert!(shared.iter().any(|layer| layer.join("own").exists()), "{shared:?}");
    // A second pull and a restarted store use the same additional layer. The layer is removed with its image.
    assert_eq!(images.pull(&registry.name("r:one"), None, None).await.unwrap().layers, one.layers);
    let usage = images.usage();
    drop(images);
    let images = store(root.path()).await;
    assert_eq!((images.list().len(), images.usage()), (2, usage));
    images.remove(&one.id).await.unwrap();
    assert_eq!(in_image(&two, "cat text"), ["two"]);
    images.remove(&two.id).await.unwrap();
    nothing_left(root.path()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn links_to_links_and_across_several_layers_are_one_file() {
    let registry = TestRegistry::start().await;
    let second = layer(TestTar::new().hard_link("deep/b", "usr/text"));
    let third = layer(TestTar::new().hard_link("c", "deep/b").directory("deep").file("usr/text", b"new"));
    registry.push("r", "three", &TestImage::new(vec![base("text"), second, third])).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let image = images.pull(&registry.name("r:three"), None, None).await.unwrap();
    assert_eq!(in_image(&image, "cat c deep/b usr/text"), ["texttextnew"]);
    let output = in_image(&image, "stat -c %i c deep/b");
    assert_eq!(output[0], output[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn links_that_lead_to_no_file_of_a_lower_layer_are_refused_and_named() {
    let registry = TestRegistry::start().await;
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("secret"), "secret").unwrap();
    let out = outside.path().to_str().unwrap();
    let climbing = format!("../../../../../../../..{out}");
    let below = layer(
        TestTar::new()
            .directory("d")
            .file("d/f", b"")
            .symlink("direct", out)
            .symlink("climbing", &climbing)
            .file("f", b""),
    );
    let cases = [
        ("nowhere", TestTar::new().hard_link("h", "no/such"), "\"no/such\""),
        ("outside", TestTar::new().hard_link("h", &format!("{out}/secret")), "/secret\""),
        ("direct", TestTar::new().hard_link("h", "direct/secret"), "\"direct/secret\""),
        ("climbing", TestTar::new().hard_link("h", "climbing/secret"), "\"climbing/secret\""),
        ("proc", TestTar::new().hard_link("h", "/proc/self/environ"), "\"proc/self/environ\""),
        ("directory", TestTar::new().hard_link("h", "d"), "\"d\""),
        ("hidden", TestTar::new().file(".wh.f", b"").hard_link("h", "f"), "\"f\""),
        ("opaque", TestTar::new().file("d/.wh..wh..opq", b"").hard_link("h", "d/f"), "\"d/f\""),
    ];
    for (name, tar, target) in cases {
        let root = tempfile::tempdir().unwrap();
        let images = store(root.path()).await;
        let top = layer(tar);
        let diff_id = top.1.to_string();
        registry.push(name, "latest", &TestImage::new(vec![below.clone(), top])).await;
        let error = images.pull(&registry.name(name), None, None).await.unwrap_err();
        let report = error.report();
        assert_eq!(error.kind(), ErrorKind::Rejected, "{report}");
        for part in [diff_id.as_str(), "the link \"h\"", target] {
            assert!(report.contains(part), "{name}: {report} lacks {part}");
        }
        nothing_left(root.path()).await;
    }
    assert_eq!(std::fs::metadata(outside.path().join("secret")).unwrap().nlink(), 1);
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let top = layer(TestTar::new().hard_link("h", "../../etc/shadow"));
    registry.push("climbs", "latest", &TestImage::new(vec![below, top])).await;
    let error = images.pull(&registry.name("climbs"), None, None).await.unwrap_err();
    assert!(error.report().contains("leads out of the image"), "{}", error.report());
}
