"""Digits, IDX files (each kind of damage) and tensorflow-datasets."""

import gzip
import os
import shutil
import struct
import types
import urllib.error

import numpy as np
import pytest

from fednest_tff import data
from fednest_tff.data import DATASETS, DataError, load, sources

NAMES = {
    'train_images': 'train-images-idx3-ubyte',
    'train_labels': 'train-labels-idx1-ubyte',
    'test_images': 't10k-images-idx3-ubyte',
    'test_labels': 't10k-labels-idx1-ubyte',
}


# Before a fixture replaces it.
CHECK_NETWORK = sources._check_network


def idx_bytes(array, magic=None):
  magic = magic or 0x0800 + array.ndim
  header = struct.pack(f'>{1 + array.ndim}I', magic, *array.shape)
  return header + array.astype(np.uint8).tobytes()


def make_arrays():
  rng = np.random.default_rng(0)
  return {
      'train_images': rng.integers(0, 256, (30, 4, 3)),
      'train_labels': np.arange(30) % 10,
      'test_images': rng.integers(0, 256, (12, 4, 3)),
      'test_labels': np.arange(12) % 10,
  }


@pytest.fixture
def mnist(tmp_path):
  """A directory with four plain files."""
  for key, array in make_arrays().items():
    (tmp_path / NAMES[key]).write_bytes(idx_bytes(array))
  return tmp_path


def read_error(*args, **options):
  """The message of the one-line error that loading ends with."""
  with pytest.raises(DataError) as raised:
    load(*args, **options)
  message = str(raised.value)
  assert '\n' not in message
  return message


def test_digits_are_stratified_and_always_the_same():
  images = load('digits')
  assert images.train_images.shape == (1438, 8, 8)
  assert images.test_images.shape == (359, 8, 8)
  assert images.train_images.dtype == images.test_images.dtype == np.float32
  assert images.train_labels.dtype == images.test_labels.dtype == np.int32
  assert images.train_images.min() == 0 and images.train_images.max() == 1
  assert images.num_classes == 10
  assert images.train_writers is None
  counts = [np.bincount(x) for x in (images.train_labels, images.test_labels)]
  np.testing.assert_allclose(counts[1] / sum(counts), 0.2, atol=0.003)
  together = np.concatenate([images.train_images, images.test_images])
  from sklearn import datasets

  original = datasets.load_digits().images
  assert sorted(x.tobytes() for x in 16 * together) == sorted(
      x.tobytes() for x in original.astype(np.float32)
  )
  np.random.seed(1)
  for one, other in zip(images[:4], load('digits')[:4], strict=True):
    np.testing.assert_array_equal(one, other)


def test_digits_take_no_directory(tmp_path):
  assert '`data_dir`' in read_error('digits', tmp_path)


def test_an_empty_directory_name_is_none():
  assert load('digits', '').num_classes == 10


def test_forbidden_directory(mnist, monkeypatch):
  # Not by permissions, since tests may run as root.
  def refuse(path):
    raise PermissionError(13, 'Permission denied', str(path))

  monkeypatch.setattr('pathlib.Path.exists', refuse)
  message = read_error('mnist', mnist)
  assert f'`data_dir`={mnist} cannot be read (PermissionError' in message


def test_errors_are_one_line():
  assert str(DataError('one\nline')) == 'one line'


def test_unknown_name():
  message = read_error('cifar')
  assert '`dataset`=cifar' in message
  assert all(name in message for name in DATASETS)


@pytest.mark.parametrize('name', ['mnist', 'fashion_mnist'])
@pytest.mark.parametrize('packing', ['plain', 'gz', 'dots', 'misnamed'])
def test_idx_files(tmp_path, name, packing):
  arrays = make_arrays()
  for key, array in arrays.items():
    path, content = tmp_path / NAMES[key], idx_bytes(array)
    if packing == 'gz':
      path, content = path.with_name(f'{path.name}.gz'), gzip.compress(content)
    elif packing == 'dots':
      path = path.with_name(path.name.replace('-idx', '.idx') + '.gz')
      content = gzip.compress(content)
    elif packing == 'misnamed':
      path = path.with_name(f'{path.name}.gz')
    path.write_bytes(content)
  images = load(name, str(tmp_path))
  for key, array in arrays.items():
    loaded = getattr(images, key)
    if key.endswith('images'):
      assert loaded.dtype == np.float32
      np.testing.assert_allclose(loaded, array / 255, rtol=1e-6)
    else:
      assert loaded.dtype == np.int32
      np.testing.assert_array_equal(loaded, array)
  assert images.num_classes == 10
  assert images.train_writers is None and images.test_writers is None


def edit(path, change):
  path.write_bytes(change(path.read_bytes()))


# What is done to which of the four files, and what the message must say.
DAMAGES = {
    'cut': ('train_images', lambda b: b[:-1], 'cut short, 375 bytes .* 376'),
    'long': ('test_images', lambda b: b + b'x', 'too long, 161 bytes .* 160'),
    'empty': ('test_labels', lambda b: b'', '0 bytes'),
    'only a header': ('train_labels', lambda b: b[:6], '6 bytes'),
    'magic': (
        'train_images',
        lambda b: struct.pack('>I', 1234) + b[4:],
        'magic number 1234 instead of 2051',
    ),
    'labels as images': (
        'test_images',
        lambda b: idx_bytes(np.arange(12) % 10),
        'magic number 2049 instead of 2051',
    ),
    'images as labels': (
        'test_labels',
        lambda b: idx_bytes(np.zeros((12, 4, 3))),
        'magic number 2051 instead of 2049',
    ),
    'a web page': ('train_labels', lambda b: b'<html>', 'magic number'),
    'counts': (
        'train_labels',
        lambda b: idx_bytes(np.arange(29) % 10),
        '30 images, but .*train-labels-idx1-ubyte has 29 labels',
    ),
    'label': (
        'test_labels',
        lambda b: b[:-2] + b'\x0a' + b[-1:],
        'label 10 at position 10 is outside of 0 to 9',
    ),
    'no examples': (
        'train_labels',
        lambda b: idx_bytes(np.zeros(0)),
        'no examples',
    ),
    'huge': (
        'train_images',
        lambda b: struct.pack('>4I', 2051, *[2**32 - 1] * 3) + b[16:],
        'its header promises',
    ),
    'bomb': (
        'train_labels',
        lambda b: gzip.compress(b + bytes(2**26)),
        r'too long, \d\d bytes or more',
    ),
    'cut gzip': (
        'train_images',
        lambda b: gzip.compress(b)[:-20],
        'cut short or damaged gzip',
    ),
    'cut gzip header': (
        'train_labels',
        lambda b: gzip.compress(b)[:5],
        'cut short or damaged gzip',
    ),
    'damaged gzip': (
        'train_images',
        lambda b: flip(gzip.compress(b), 100),
        'cut short or damaged gzip',
    ),
    'gzip checksum': (
        'train_images',
        lambda b: flip(gzip.compress(b), -6),
        'cut short or damaged gzip',
    ),
}


def flip(content, position):
  content = bytearray(content)
  content[position] ^= 0xFF
  return bytes(content)


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_idx_files(mnist, damage):
  key, change, expected = DAMAGES[damage]
  edit(mnist / NAMES[key], change)
  with pytest.raises(DataError, match=expected) as raised:
    load('mnist', mnist)
  message = str(raised.value)
  assert '\n' not in message
  assert str(mnist / NAMES[key]) in message


@pytest.mark.parametrize('key', NAMES)
def test_missing_idx_file(mnist, key):
  (mnist / NAMES[key]).unlink()
  message = read_error('mnist', mnist)
  assert message.startswith(f'{mnist / NAMES[key]}[.gz] does not exist')
  assert all(name in message for name in NAMES.values())


def test_sizes_of_training_and_test_images_differ(mnist):
  (mnist / NAMES['test_images']).write_bytes(idx_bytes(np.zeros((12, 3, 4))))
  assert '4x3 pixels, but test images of 3x4' in read_error('mnist', mnist)


def test_directory_in_place_of_a_file(mnist):
  path = mnist / NAMES['train_labels']
  path.unlink()
  path.mkdir()
  assert f'{path}: cannot be read' in read_error('mnist', mnist)
  # A pipe that nobody writes to would be waited for.
  path.rmdir()
  os.mkfifo(path)
  assert f'{path}: cannot be read' in read_error('mnist', mnist)


def test_no_more_is_unpacked_than_the_header_promises(mnist, monkeypatch):
  path = mnist / NAMES['train_labels']
  edit(path, lambda b: gzip.compress(b + bytes(2**26)))
  read, sizes = gzip.GzipFile.read, []

  def noted(self, size=-1):
    sizes.append(size)
    return read(self, size)

  monkeypatch.setattr(gzip.GzipFile, 'read', noted)
  read_error('mnist', mnist)
  assert sizes and 0 <= min(sizes) and sum(sizes) < 200


def test_fingerprint(mnist, tmp_path):
  """The same for the same data elsewhere; another for one pixel."""
  before = data.fingerprint(load('mnist', mnist))
  elsewhere = shutil.copytree(mnist, tmp_path / 'elsewhere')
  path = elsewhere / NAMES['test_images']
  path.with_name(f'{path.name}.gz').write_bytes(gzip.compress(path.read_bytes()))
  path.unlink()
  assert data.fingerprint(load('mnist', elsewhere)) == before
  edit(mnist / NAMES['train_images'], lambda b: flip(b, -1))
  assert data.fingerprint(load('mnist', mnist)) != before


def test_no_directory(tmp_path):
  message = read_error('mnist', tmp_path / 'typo')
  assert f'`data_dir`={tmp_path}/typo does not exist' in message
  assert NAMES['train_images'] in message
  path = tmp_path / 'file'
  path.touch()
  assert 'is not a directory' in read_error('fashion_mnist', path)


@pytest.fixture
def tfds(tmp_path, monkeypatch):
  """tensorflow-datasets with a cache of its own."""
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  import tensorflow_datasets
  from tensorflow_datasets.core import constants

  monkeypatch.setattr(constants, 'DATA_DIR', str(tmp_path))
  monkeypatch.setattr(sources, '_check_network', lambda builder: None)
  return tensorflow_datasets


@pytest.mark.parametrize('name', ['mnist', 'fashion_mnist'])
def test_tfds(tfds, monkeypatch, name):
  monkeypatch.setitem(sources._SIZES, name, (7, 7))
  with tfds.testing.mock_data(num_examples=7):
    images = load(name)
    builder = tfds.builder(name)
    for part in ('train', 'test'):
      raw = list(tfds.as_numpy(builder.as_dataset(split=part)))
      np.testing.assert_allclose(
          getattr(images, f'{part}_images'),
          np.stack([example['image'][..., 0] for example in raw]) / 255,
          rtol=1e-6,
      )
      labels = getattr(images, f'{part}_labels')
      assert labels.dtype == np.int32
      assert list(labels) == [example['label'] for example in raw]
  assert images.train_images.dtype == np.float32
  assert images.train_images.max() > 0.9


@pytest.mark.parametrize('sizes', [(7, 8), (6, 7)])
def test_tfds_that_delivers_another_number(tfds, monkeypatch, sizes):
  monkeypatch.setitem(sources._SIZES, 'mnist', sizes)
  with tfds.testing.mock_data(num_examples=7):
    message = read_error('mnist')
  assert f'7 of {[size for size in sizes if size != 7][0]} examples' in message
  assert 'delete it' in message and NAMES['train_images'] in message


def test_tfds_sizes():
  assert sources._SIZES == dict.fromkeys(
      ['mnist', 'fashion_mnist'], (60_000, 10_000)
  )


def test_tfds_cache_without_files(tfds, tmp_path):
  directory = tmp_path / 'mnist' / '3.0.1'
  directory.mkdir(parents=True)
  message = read_error('mnist')
  assert str(directory) in message and 'delete it' in message


def test_tfds_without_network(tfds, tmp_path, monkeypatch):
  monkeypatch.setattr(sources, '_check_network', CHECK_NETWORK)
  asked = []

  def refuse(request, timeout):
    asked.append((request.full_url, timeout))
    raise urllib.error.URLError('no route\nto host')

  monkeypatch.setattr('urllib.request.urlopen', refuse)
  message = read_error('mnist')
  assert 'download failed (URLError' in message
  assert all(name in message for name in NAMES.values())
  [(url, timeout)] = asked
  assert 'mnist' in url and timeout <= 30
  assert not list(tmp_path.iterdir())


def test_a_server_that_refuses_the_question_is_a_network(monkeypatch):
  def refuse(request, timeout):
    assert request.method == 'HEAD'
    raise urllib.error.HTTPError(request.full_url, 405, 'no', {}, None)

  monkeypatch.setattr('urllib.request.urlopen', refuse)
  CHECK_NETWORK(types.SimpleNamespace(url_infos={'http://x.org/f': None}))
