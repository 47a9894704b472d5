"""EMNIST by writer from .npz files, whole and damaged."""

import os
import zipfile

import numpy as np
import pytest

from fednest_tff.data import DataError, load

KEYS = [
    f'{part}_{kind}'
    for part in ('train', 'test')
    for kind in ('images', 'labels', 'writer')
] + ['writer_ids']


def make_arrays():
  rng = np.random.default_rng(0)
  arrays = {'writer_ids': np.array(['f01', 'f02', 'f03'])}
  for part, size in (('train', 40), ('test', 15)):
    images = rng.integers(0, 256, (size, 28, 28)).astype(np.uint8)
    images[0] = 255
    arrays[f'{part}_images'] = images
    labels = rng.integers(0, 62, size)
    labels[:10] = range(10)
    arrays[f'{part}_labels'] = labels.astype(np.uint8)
    arrays[f'{part}_writer'] = rng.integers(0, 3, size).astype(np.uint16)
  return arrays


@pytest.mark.parametrize('only_digits', [True, False])
@pytest.mark.parametrize('as_file', [True, False])
def test_npz(tmp_path, only_digits, as_file):
  path = tmp_path / 'some.npz'
  arrays = make_arrays()
  np.savez_compressed(path, **arrays)
  images = load('emnist', path if as_file else tmp_path, only_digits)
  assert images.num_classes == (10 if only_digits else 62)
  for part in ('train', 'test'):
    labels = arrays[f'{part}_labels']
    kept = labels < (10 if only_digits else 62)
    loaded = getattr(images, f'{part}_images')
    assert loaded.dtype == np.float32
    assert loaded[0].max() == 0
    np.testing.assert_allclose(
        loaded, 1 - arrays[f'{part}_images'][kept] / 255, atol=1e-6
    )
    for kind, name in (('labels', 'labels'), ('writers', 'writer')):
      loaded = getattr(images, f'{part}_{kind}')
      assert loaded.dtype == np.int32
      np.testing.assert_array_equal(loaded, arrays[f'{part}_{name}'][kept])


def replace(key, change):
  def apply(arrays):
    arrays[key] = change(arrays[key])

  return apply


def put(position, value):
  def change(array):
    array = array.astype(np.int64)
    array[position] = value
    return array

  return change


# What is done to the arrays, and what the message must say.
DAMAGES = {
    'label': (
        replace('train_labels', put(7, 62)),
        'train_labels: label 62 at position 7 is outside of 0 to 61',
    ),
    'negative label': (replace('test_labels', put(3, -1)), 'label -1 .* 3 '),
    'writer': (
        replace('test_writer', put(0, 3)),
        'test_writer goes from 0 to 3, but writer_ids has 3 entries',
    ),
    'negative writer': (replace('train_writer', put(0, -1)), 'from -1 to 2'),
    'writers by name': (
        replace('train_writer', lambda a: a.astype(str)),
        r'train_writer is <U\d+ \[40\]',
    ),
    'fewer labels': (
        replace('train_labels', lambda a: a[1:]),
        '40 train_images, but 39 train_labels',
    ),
    'more writers': (
        replace('test_writer', lambda a: np.append(a, a[:1])),
        '15 test_images, but 16 test_writer',
    ),
    'float images': (
        replace('test_images', lambda a: a / 255),
        r'test_images is float64 \[15, 28, 28\]',
    ),
    'flat images': (
        replace('train_images', lambda a: a.reshape(len(a), -1)),
        r'train_images is uint8 \[40, 784\]',
    ),
    'scalar images': (
        replace('train_images', lambda a: a[0, 0, 0]),
        r'train_images is uint8 \[\]',
    ),
    'float labels': (
        replace('train_labels', lambda a: a.astype(float)),
        r'train_labels is float64 \[40\]',
    ),
    'labels as a column': (
        replace('train_labels', lambda a: a[:, None]),
        r'train_labels is uint8 \[40, 1\]',
    ),
    'pickles': (
        replace('test_labels', lambda a: a.astype(object)),
        r'damaged \(ValueError: Object arrays cannot be loaded',
    ),
    'no images': (
        lambda arrays: arrays.update({k: arrays[k][:0] for k in KEYS[:3]}),
        'train_images is empty',
    ),
    'no digits': (
        replace('test_labels', lambda a: np.full_like(a, 20)),
        'no digits; pass `emnist_only_digits`=False',
    ),
} | {
    f'no {key}': (lambda arrays, key=key: arrays.pop(key), f'lacks {key};')
    for key in KEYS
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_arrays(tmp_path, damage):
  change, expected = DAMAGES[damage]
  arrays = make_arrays()
  change(arrays)
  path = tmp_path / 'some.npz'
  np.savez(path, **arrays)
  assert_error(path, expected, tmp_path)


def assert_error(path, expected, *args):
  with pytest.raises(DataError, match=expected) as raised:
    load('emnist', *args)
  assert '\n' not in str(raised.value)
  assert str(path) in str(raised.value)


@pytest.mark.parametrize('share', [0.0, 0.1, 0.5, 0.999])
def test_cut_npz(tmp_path, share):
  path = tmp_path / 'some.npz'
  np.savez_compressed(path, **make_arrays())
  content = path.read_bytes()
  path.write_bytes(content[: int(share * len(content))])
  assert_error(path, 'cut short; fetch it again', tmp_path)


def test_flipped_bits_in_an_npz(tmp_path):
  path = tmp_path / 'some.npz'
  np.savez_compressed(path, **make_arrays())
  content = bytearray(path.read_bytes())
  content[len(content) // 4] ^= 0xFF
  path.write_bytes(content)
  assert_error(path, r'damaged \(.*train_images.*writer_ids', tmp_path)


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_no_flipped_byte_changes_an_example(tmp_path, save):
  path = tmp_path / 'some.npz'
  arrays = {
      key: array if key == 'writer_ids' else array[:12]
      for key, array in make_arrays().items()
  }
  save(path, **arrays)
  content = path.read_bytes()
  expected = load('emnist', path, only_digits=False)
  rng = np.random.default_rng(0)
  # The first array's header, the archive's directory, and anywhere.
  places = [
      *range(0, 200, 2),
      *range(len(content) - 500, len(content), 4),
      *rng.integers(0, len(content), 100),
  ]
  refused = 0
  for place in places:
    damaged = bytearray(content)
    damaged[place] ^= 1 << rng.integers(8)
    path.write_bytes(damaged)
    try:
      images = load('emnist', path, only_digits=False)
    except DataError as error:
      assert str(path) in str(error) and '\n' not in str(error)
      refused += 1
    else:
      for one, other in zip(images, expected, strict=True):
        np.testing.assert_array_equal(one, other)
  assert refused > len(places) / 2


def test_an_npy_file_in_disguise(tmp_path):
  path = tmp_path / 'some.npz'
  with path.open('wb') as file:
    np.save(file, np.zeros(3))
  assert_error(path, 'no .npz file', path)


def test_no_npz_or_several(tmp_path):
  assert_error(tmp_path, r'0 \.npz files \(none\); .*exactly one', tmp_path)
  (tmp_path / 'a.npz').touch()
  (tmp_path / 'b.npz').touch()
  assert_error(tmp_path, r'2 \.npz files \(a.npz, b.npz\)', tmp_path)
  missing = tmp_path / 'typo'
  assert_error(missing, '`data_dir`=.* does not exist', missing)


def rewrite(path, member, content):
  """Replaces a member of a zip file."""
  with zipfile.ZipFile(path) as archive:
    members = {name: archive.read(name) for name in archive.namelist()}
  members[member] = content
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
    for name, each in members.items():
      archive.writestr(name, each)


@pytest.mark.parametrize(
    'change, expected',
    [
        (lambda content: b'no array at all', 'train_labels is not an array'),
        (lambda content: b'', 'train_labels is not an array'),
        # A bomb: more than the header promises, packed into a few bytes.
        (
            lambda content: content + bytes(2**26),
            'has 67108904 bytes where its header promises 40',
        ),
        (lambda content: content[:-1], 'has 39 bytes'),
        (
            lambda content: content.replace(b'(40,)', b'[2**9', 1),
            'damaged|is not an array',
        ),
        (
            lambda content: content.replace(
                b'(40,), }' + b' ' * 12, b'(9999999999999,), } ', 1
            ),
            'promises 9999999999999 bytes',
        ),
    ],
)
def test_member_that_is_no_array(tmp_path, change, expected):
  path = tmp_path / 'some.npz'
  np.savez(path, **make_arrays())
  with zipfile.ZipFile(path) as archive:
    content = archive.read('train_labels.npy')
  changed = change(content)
  assert changed != content
  rewrite(path, 'train_labels.npy', changed)
  assert_error(path, expected, tmp_path)


def test_pipe_in_place_of_the_file(tmp_path):
  path = tmp_path / 'some.npz'
  os.mkfifo(path)
  assert_error(path, 'it is not a file', tmp_path)
  assert_error(path, 'it is not a file', path)
