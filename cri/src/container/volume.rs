//! Validation of volumes, by the rules of `Mount` in the CRI's api.proto. Pure.

use coracle_proto::cri::Mount;

use crate::error::Error;
use crate::host::Kernel;
use crate::sandbox::user_namespace;

/// Supported mount options: those of a pod's `bindMountOptions`, and the modes of access time updates.
const OPTIONS: [&str; 7] = ["nodev", "noexec", "nosuid", "noatime", "nodiratime", "relatime", "strictatime"];

/// Refuses a contradictory volume, or one that the kernel does not support.
pub(crate) fn check(mount: &Mount, kernel: Kernel) -> Result<(), Error> {
    if !mount.container_path.starts_with('/') {
        return Err(Error::invalid("mounts.container_path", "must be absolute"));
    }
    user_namespace::check_volume(mount).map_err(|why| Error::invalid("mounts.uid_mappings", why))?;
    if let Some(option) = mount.mount_options.iter().find(|option| !OPTIONS.contains(&option.as_str())) {
        let why = format!("{option:?} must be one of {}", OPTIONS.join(", "));
        return Err(Error::invalid("mounts.mount_options", why));
    }
    if mount.recursive_read_only {
        if !mount.readonly || mount.propagation != 0 {
            let why = "needs readonly and private propagation";
            return Err(Error::invalid("mounts.recursive_read_only", why));
        }
        if !kernel.recursive_read_only {
            return Err(Error::Unsupported("a recursive read-only volume (needs Linux 5.12)"));
        }
    }
    check_image(mount)
}

fn check_image(mount: &Mount) -> Result<(), Error> {
    let Some(image) = &mount.image else {
        if !mount.host_path.starts_with('/') {
            return Err(Error::invalid("mounts.host_path", "must be absolute"));
        }
        return match mount.image_sub_path.as_str() {
            "" => Ok(()),
            _ => Err(Error::invalid("mounts.image_sub_path", "is set without an image")),
        };
    };
    let refuse = |why| Err(Error::invalid("mounts.image", why));
    if image.image.is_empty() {
        return refuse("has an empty image name");
    }
    if !image.runtime_handler.is_empty() {
        return refuse("has a runtime handler, which does not exist");
    }
    if !mount.host_path.is_empty() {
        return refuse("is set together with host_path");
    }
    if !mount.readonly {
        return refuse("must be readonly");
    }
    if mount.propagation != 0 {
        return refuse("must have private propagation");
    }
    let sub_path = mount.image_sub_path.as_str();
    if sub_path.starts_with('/') || sub_path.split('/').any(|part| part == "..") {
        return Err(Error::invalid("mounts.image_sub_path", "must be a relative path inside the image"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::ImageSpec;

    use super::*;

    const KERNEL: Kernel = Kernel { user_namespaces: true, recursive_read_only: true };

    fn volume() -> Mount {
        Mount { container_path: "/v".into(), host_path: "/h".into(), ..Default::default() }
    }

    fn image() -> Mount {
        let image = ImageSpec { image: "x".into(), ..Default::default() };
        Mount { host_path: String::new(), readonly: true, image: Some(image), ..volume() }
    }

    #[test]
    fn contradictory_volumes_are_refused() {
        let right = [
            volume(),
            Mount { readonly: true, recursive_read_only: true, ..volume() },
            Mount { mount_options: vec!["noexec".into(), "noatime".into()], ..volume() },
            image(),
            Mount { image_sub_path: "etc/x".into(), ..image() },
        ];
        for mount in right {
            assert!(check(&mount, KERNEL).is_ok(), "{mount:?}");
        }
        let handled = ImageSpec { image: "x".into(), runtime_handler: "other".into(), ..Default::default() };
        let wrong = [
            Mount { container_path: "v".into(), ..volume() },
            Mount { recursive_read_only: true, ..volume() },
            Mount { readonly: true, recursive_read_only: true, propagation: 1, ..volume() },
            Mount { mount_options: vec!["suid".into()], ..volume() },
            Mount { image_sub_path: "x".into(), ..volume() },
            Mount { readonly: false, ..image() },
            Mount { host_path: "/h".into(), ..image() },
            Mount { propagation: 2, ..image() },
            Mount { image_sub_path: "../x".into(), ..image() },
            Mount { image: Some(ImageSpec::default()), ..image() },
            Mount { image: Some(handled), ..image() },
            Mount { host_path: "h".into(), ..volume() },
            Mount { host_path: String::new(), ..volume() },
        ];
        for mount in wrong {
            assert!(check(&mount, KERNEL).is_err(), "{mount:?}");
        }
        let old = Kernel { recursive_read_only: false, ..KERNEL };
        assert!(check(&Mount { readonly: true, recursive_read_only: true, ..volume() }, old).is_err());
    }
}
