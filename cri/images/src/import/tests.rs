//! Tests with archives and layouts as other tools write them.

use std::path::Path;

use crate::digest::Digest;
use crate::fixture::{TestImage, TestTar, descriptor, gzip, layer, zstd};
use crate::{ErrorKind, Images, ImagesConfig, Usage};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

fn blob(content: &[u8]) -> String {
    format!("blobs/sha256/{}", Digest::of(content).hex())
}

/// The files of an OCI layout of some images, each with its annotations.
fn layout(images: &[(&TestImage, serde_json::Value)]) -> Vec<(String, Vec<u8>)> {
    let mut files = vec![("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec())];
    let mut manifests = Vec::new();
    for (image, annotations) in images {
        let mut entry = descriptor(MANIFEST, &image.manifest);
        entry["annotations"] = annotations.clone();
        manifests.push(entry);
        for content in image.layers.iter().chain([&image.config, &image.manifest]) {
            files.push((blob(content), content.clone()));
        }
    }
    let index = serde_json::json!({"schemaVersion": 2, "manifests": manifests});
    files.push(("index.json".to_owned(), serde_json::to_vec(&index).unwrap()));
    files
}

fn archive(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    files.iter().fold(TestTar::new(), |tar, (name, content)| tar.file(&format!("./{name}"), content)).finish()
}

async fn store(root: &Path) -> Images {
    Images::open(ImagesConfig::new(root)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn layouts_and_archives_of_any_compression_are_imported() {
    let image = TestImage::small("imported");
    let files =
        layout(&[(&image, serde_json::json!({"io.containerd.image.name": "docker.io/library/app:1"}))]);
    let tar = archive(&files);
    let work_dir = tempfile::tempdir().unwrap();
    let directory = work_dir.path().join("layout");
    for (name, content) in &files {
        let path = directory.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    for (name, content) in [("a.tar", tar.clone()), ("a.tar.gz", gzip(&tar)), ("a.tar.zst", zstd(&tar))] {
        std::fs::write(work_dir.path().join(name), content).unwrap();
    }
    for name in ["layout", "a.tar", "a.tar.gz", "a.tar.zst"] {
        let root = tempfile::tempdir().unwrap();
        let images = store(root.path()).await;
        let imported = images.import(&work_dir.path().join(name), None).await.unwrap();
        assert_eq!(imported.len(), 1);
        assert_eq!(
            (imported[0].id.as_str(), imported[0].tags.as_slice()),
            (image.id().as_str(), ["docker.io/library/app:1".to_owned()].as_slice())
        );
        assert_eq!(imported[0].digests, [format!("docker.io/library/app@{}", Digest::of(&image.manifest))]);
        assert_eq!(std::fs::read(imported[0].layers[0].join("hello")).unwrap(), b"imported");
        assert!(images.get("app:1").is_some());
        assert_eq!(std::fs::read_dir(root.path().join("images/partial")).unwrap().count(), 0, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_a_layout_that_are_outside_of_it_or_pipes_are_refused() {
    let image = TestImage::small("imported");
    let files = layout(&[(&image, serde_json::json!({"io.containerd.image.name": "example.com/app:1"}))]);
    let work_dir = tempfile::tempdir().unwrap();
    let (directory, outside) = (work_dir.path().join("layout"), work_dir.path().join("outside"));
    std::fs::create_dir(&outside).unwrap();
    for (number, (name, content)) in files.iter().enumerate() {
        let (path, file) = (directory.join(name), outside.join(number.to_string()));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&file, content).unwrap();
        std::os::unix::fs::symlink(&file, &path).unwrap();
    }
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let import = async || images.import(&directory, None).await.unwrap_err();
    let why = |error: &dyn std::error::Error| {
        std::iter::successors(Some(error), |error| error.source())
            .map(ToString::to_string)
            .collect::<String>()
    };
    assert!(why(&import().await).contains("a link leads out of the layout directory"));
    let index = directory.join("index.json");
    std::fs::remove_file(&index).unwrap();
    nix::unistd::mkfifo(&index, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    assert!(why(&import().await).contains("not a regular file"));
    assert!(why(&images.import(&index, None).await.unwrap_err()).contains("not a regular file"));
}

#[tokio::test(flavor = "multi_thread")]
async fn names_come_from_annotations_or_the_caller() {
    let (one, two) = (TestImage::small("one"), TestImage::small("two"));
    let work_dir = tempfile::tempdir().unwrap();
    let path = work_dir.path().join("a.tar");
    let full = serde_json::json!({"org.opencontainers.image.ref.name": "example.com/two:2"});
    let bare = serde_json::json!({"org.opencontainers.image.ref.name": "latest"});
    std::fs::write(&path, archive(&layout(&[(&one, bare.clone()), (&two, full)]))).unwrap();
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let imported = images.import(&path, None).await.unwrap();
    assert_eq!(
        (imported[0].tags.len(), imported[1].tags.as_slice()),
        (0, ["example.com/two:2".to_owned()].as_slice())
    );
    assert_eq!(images.import(&path, Some("x")).await.unwrap_err().kind(), ErrorKind::Unsupported);
    std::fs::write(&path, archive(&layout(&[(&one, bare)]))).unwrap();
    let named = images.import(&path, Some("nginx")).await.unwrap();
    assert_eq!(named[0].tags, ["docker.io/library/nginx:latest"]);
    assert_eq!(images.list().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_platform_of_this_machine_is_imported_from_several_under_one_name() {
    let images = ["first", "second", "third"].map(TestImage::small);
    let name = serde_json::json!({"io.containerd.image.name": "example.com/app:1"});
    let host = crate::config::Platform::host().architecture;
    let work_dir = tempfile::tempdir().unwrap();
    let path = work_dir.path().join("a.tar");
    for (name, platforms, expected) in [
        (&name, [Some("s390x"), Some(host.as_str()), Some("mips")], vec![1]),
        (&name, [Some("s390x"), Some("mips"), Some("mips64")], vec![0, 1, 2]),
        // Entries without names are several images.
        (&serde_json::json!({}), [Some(host.as_str()), None, Some("mips")], vec![0, 1]),
    ] {
        let mut files = layout(&images.each_ref().map(|image| (image, name.clone())));
        let (_, index) = files.last_mut().unwrap();
        let mut value: serde_json::Value = serde_json::from_slice(index).unwrap();
        for (at, platform) in platforms.iter().enumerate() {
            if let Some(architecture) = platform {
                value["manifests"][at]["platform"] =
                    serde_json::json!({"os": "linux", "architecture": architecture});
            }
        }
        *index = serde_json::to_vec(&value).unwrap();
        std::fs::write(&path, archive(&files)).unwrap();
        let root = tempfile::tempdir().unwrap();
        let imported = store(root.path()).await.import(&path, None).await.unwrap();
        let ids: Vec<&str> = imported.iter().map(|image| image.id.as_str()).collect();
        let all = images.each_ref().map(TestImage::id);
        assert_eq!(ids, expected.iter().map(|at| all[*at].as_str()).collect::<Vec<_>>(), "{platforms:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_save_archives_are_imported() {
    let tar = TestTar::new().file("hello", b"saved").finish();
    let image = TestImage::new(vec![(tar.clone(), Digest::of(&tar))]);
    let list = serde_json::json!([{"Config": "c.json", "RepoTags": ["saved:1", "example.com/x:2"], "Layers": ["l/layer.tar"]}]);
    let saved = TestTar::new()
        .file("l/layer.tar", &tar)
        .file("c.json", &image.config)
        .file("manifest.json", list.to_string().as_bytes())
        .finish();
    let work_dir = tempfile::tempdir().unwrap();
    let path = work_dir.path().join("saved.tar");
    std::fs::write(&path, saved).unwrap();
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let imported = images.import(&path, None).await.unwrap();
    assert_eq!(imported[0].tags, ["docker.io/library/saved:1", "example.com/x:2"]);
    assert_eq!(imported[0].id, image.id());
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_saved_as_links_by_older_dockers_are_imported() {
    let one = TestTar::new().file("one", b"1").finish();
    let two = TestTar::new().file("two", b"2").finish();
    let image = |layers: &[&Vec<u8>]| {
        TestImage::new(layers.iter().map(|tar| ((*tar).clone(), Digest::of(tar))).collect())
    };
    // Two images share their layers. The layer files of the second image are links, one of them to another link.
    let (first, second) = (image(&[&one, &two]), image(&[&two, &one]));
    let list = serde_json::json!([
        {"Config": "first.json", "RepoTags": ["first:1"], "Layers": ["a/layer.tar", "b/layer.tar"]},
        {"Config": "second.json", "RepoTags": ["second:1"], "Layers": ["c/layer.tar", "d/layer.tar"]},
    ]);
    let list = list.to_string();
    let rest = |tar: TestTar| {
        let tar = tar.file("first.json", &first.config).file("second.json", &second.config);
        tar.file("manifest.json", list.as_bytes()).file("repositories", b"{}").finish()
    };
    let archives = [
        rest(
            TestTar::new()
                .directory("a/")
                .file("a/VERSION", b"1.0")
                .file("a/layer.tar", &one)
                .file("b/layer.tar", &two)
                .symlink("c/layer.tar", "../b/layer.tar")
                .symlink("d/layer.tar", "../a/layer.tar"),
        ),
        rest(
            TestTar::new()
                .symlink("c/layer.tar", "./../d/../b/layer.tar")
                .file("b/layer.tar", &two)
                .symlink("d/layer.tar", "../e/layer.tar")
                .symlink("e/layer.tar", "/a/layer.tar")
                .file("a/layer.tar", &one),
        ),
        rest(
            TestTar::new()
                .file("./a/layer.tar", &one)
                .file("./b/layer.tar", &two)
                .hard_link("./c/layer.tar", "./b/layer.tar")
                .hard_link("./d/layer.tar", "a/layer.tar"),
        ),
    ];
    let work_dir = tempfile::tempdir().unwrap();
    for (number, archive) in archives.into_iter().enumerate() {
        let path = work_dir.path().join(format!("{number}.tar"));
        std::fs::write(&path, archive).unwrap();
        let root = tempfile::tempdir().unwrap();
        let images = store(root.path()).await;
        let imported = images.import(&path, None).await.map_err(|error| error.report()).unwrap();
        let ids: Vec<&str> = imported.iter().map(|image| image.id.as_str()).collect();
        assert_eq!(ids, [first.id(), second.id()], "{number}");
        assert_eq!(std::fs::read(imported[1].layers[0].join("one")).unwrap(), b"1");
        assert_eq!(imported[1].layers, [imported[0].layers[1].clone(), imported[0].layers[0].clone()]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn links_to_files_outside_the_archive_are_refused() {
    let tar = TestTar::new().file("one", b"1").finish();
    let image = TestImage::new(vec![(tar.clone(), Digest::of(&tar))]);
    let list = serde_json::json!([{"Config": "c.json", "RepoTags": ["a:1"], "Layers": ["d/layer.tar"]}]);
    let work_dir = tempfile::tempdir().unwrap();
    let path = work_dir.path().join("bad.tar");
    for target in ["../c/layer.tar", "../d/layer.tar", "../../../../etc/passwd", "../none/layer.tar"] {
        let archive = TestTar::new().file("a/layer.tar", &tar).file("c.json", &image.config);
        let archive = archive.symlink("c/layer.tar", target).symlink("d/layer.tar", "../c/layer.tar");
        std::fs::write(&path, archive.file("manifest.json", list.to_string().as_bytes()).finish()).unwrap();
        let root = tempfile::tempdir().unwrap();
        let error = store(root.path()).await.import(&path, None).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.report());
        assert!(error.report().contains("/layer.tar is missing"), "{}", error.report());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_archives_are_refused_and_leave_nothing() {
    let image = TestImage::small("x");
    let files = layout(&[(&image, serde_json::json!({}))]);
    let mut incomplete = files.clone();
    let layer_file = incomplete.iter_mut().find(|(name, _)| *name == blob(&image.layers[0])).unwrap();
    layer_file.1 = gzip(&TestTar::new().file("hello", b"other").finish());
    let missing: Vec<_> = files.iter().filter(|(name, _)| *name != blob(&image.layers[0])).cloned().collect();
    let evil = TestImage::new(vec![layer(TestTar::new().file("../evil", b""))]);
    let work_dir = tempfile::tempdir().unwrap();
    let cases = [
        (archive(&incomplete), ErrorKind::Corrupt),
        (archive(&missing), ErrorKind::Corrupt),
        (archive(&layout(&[(&evil, serde_json::json!({}))])), ErrorKind::Rejected),
        (b"no archive at all, but longer than a header would be".repeat(20), ErrorKind::Unsupported),
        (archive(&[]), ErrorKind::Unsupported),
        (gzip(&archive(&files))[..200].to_vec(), ErrorKind::Corrupt),
    ];
    for (content, kind) in cases {
        let path = work_dir.path().join("bad.tar");
        std::fs::write(&path, content).unwrap();
        let root = tempfile::tempdir().unwrap();
        let images = store(root.path()).await;
        let error = images.import(&path, None).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{}", error.report());
        assert_eq!((images.list().len(), images.usage()), (0, Usage::default()));
        assert_eq!(std::fs::read_dir(root.path().join("images/partial")).unwrap().count(), 0);
        assert_eq!(std::fs::read_dir(root.path().join("images/layers")).unwrap().count(), 0);
    }
    let root = tempfile::tempdir().unwrap();
    let absent = work_dir.path().join("none.tar");
    let error = store(root.path()).await.import(&absent, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let report = format!("cannot import {}: No such file or directory", absent.display());
    assert_eq!(error.report(), report, "the path is named once");
}

/// CVE-2023-25153: documents of an archive were read into memory without a limit. Many images that share one
/// configuration also take much memory.
#[tokio::test(flavor = "multi_thread")]
async fn cve_2023_25153_documents_that_take_much_memory_are_refused() {
    let mut config = TestImage::small("x").config;
    config.resize(2 << 20, b' ');
    let too_long = [config.as_slice(), b" "].concat();
    let spaces = vec![b' '; (4 << 20) + 1];
    let list = serde_json::json!(vec![serde_json::json!({"Config": "c.json"}); 33]).to_string();
    let with_config =
        |config: &[u8]| TestTar::new().file("c.json", config).file("manifest.json", list.as_bytes());
    let work_dir = tempfile::tempdir().unwrap();
    let path = work_dir.path().join("large.tar");
    for (tar, says) in [
        (TestTar::new().file("index.json", &spaces), "index.json is larger than 4194304 bytes"),
        (TestTar::new().file("manifest.json", &spaces), "manifest.json is larger than 4194304 bytes"),
        (with_config(&too_long), "c.json is larger than 2097152 bytes"),
        (with_config(&config), "the list of images with their configurations is larger than 67108864 bytes"),
    ] {
        std::fs::write(&path, tar.finish()).unwrap();
        let root = tempfile::tempdir().unwrap();
        let error = store(root.path()).await.import(&path, None).await.unwrap_err();
        assert!(error.report().contains(says), "{}", error.report());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_error_for_a_damaged_archive_names_the_damage() {
    let whole = archive(&layout(&[(&TestImage::small("x"), serde_json::json!({}))]));
    let (root, work_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = work_dir.path().join("incomplete.tar");
    // The first entry has two blocks of 512 bytes; the second header is incomplete.
    std::fs::write(&path, &whole[..1024 + 100]).unwrap();
    let error = store(root.path()).await.import(&path, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.report().contains("the archive ends inside a header"), "{}", error.report());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compressed_archive_is_unpacked_within_bounds() {
    let work_dir = tempfile::tempdir().unwrap();
    let bomb = work_dir.path().join("bomb.tar.gz");
    std::fs::write(&bomb, gzip(&vec![0; 1 << 20])).unwrap();
    let root = tempfile::tempdir().unwrap();
    let mut config = ImagesConfig::new(root.path());
    (config.limits.ratio, config.limits.ratio_from) = (10, 64 << 10);
    let images = Images::open(config).await.unwrap();
    let error = images.import(&bomb, None).await.unwrap_err().report();
    assert!(error.contains("is larger than"), "{error}");
    assert_eq!(std::fs::read_dir(root.path().join("images/partial")).unwrap().count(), 0);
}
